"""Bulk adaptation on Ray: many processes amortize, and the driver process commits, in the order of the input.

1. *Look.* Workers read all files and check every document. Bad input raises its error here, before anything changes.
   The driver gets ids and digests, and groups the documents that bank or retriever lack, as `MACEngine.adapt` does.
2. *Amortize.* For each group, a free actor reads and encodes the documents and writes a block beside the bank.
3. *Commit.* Once all blocks are there, the driver puts group after group into retriever and bank.

So the order in which actors finish does not matter, and each group is encoded as a whole by one actor. After a crash,
the same call reuses the finished blocks.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mac_rag.adapting import GROUP, DocumentWriter, check_supersession
from mac_rag.bank.bank import MemoryBank
from mac_rag.config import BoundConfig
from mac_rag.data.characters import shown_id
from mac_rag.data.provenance import Member
from mac_rag.data.readers import STDIN
from mac_rag.data.types import AdaptReport
from mac_rag.distributed.cluster import connected_ray
from mac_rag.distributed.groups import Found, Group
from mac_rag.distributed.staging import Staging
from mac_rag.distributed.workers import CPUS, Amortizer, BulkJob, find_documents, from_row, to_row
from mac_rag.errors import BankError, ConfigError, WorkerError
from mac_rag.model import AmortizedModel, MACModel
from mac_rag.progress import progress_bar
from mac_rag.sync import SyncedBank, is_held

if TYPE_CHECKING:
    from mac_rag.retrieval.base import Retriever

_log = logging.getLogger(__name__)
_MOST_TASKS = 10_000  # of one step; beyond that, a task takes several groups, one by one


class BulkAdapter:
    """Adapts a bank to the documents of files, on a Ray cluster.

    The bank has the same rows in the same order as one that `MACEngine.adapt` makes of the same documents; they are
    equal bit by bit if both use the same kind of processor, versions of libraries and number of threads (an actor has
    one thread).

    Args:
        model: the model, on any device; it checks the bank, and finishes an interrupted change.
        name: name or path by which workers load the same model.
        bank: an open bank on disk, or one that its first commit creates.
        path: file of the bank; workers write their blocks beside it.
        retriever: stores the texts; None for a bank alone.
        bound: largest size of the bank, and how to reduce it; None lets it grow.
        actors: largest number of actors; None for one per GPU of the cluster, or per CPU if there are no GPUs.

    Raises:
        FingerprintError: if another model wrote the bank.
        ConfigError: for a model that is not amortized.
    """

    def __init__(
        self,
        model: MACModel,
        name: str,
        bank: MemoryBank,
        path: Path,
        retriever: Retriever | None = None,
        *,
        bound: BoundConfig | None = None,
        actors: int | None = None,
    ) -> None:
        bank.check_model(model.fingerprint)
        if not isinstance(model, AmortizedModel):
            raise ConfigError(f"workers write no rows of a model of the kind {model.kind!r}; adapt without Ray")
        self._model = model
        self._name = name
        self._path = path
        self._writer = DocumentWriter(model, bound)
        self._synced = SyncedBank(bank, retriever)
        self._actors = actors

    def adapt(
        self, files: Sequence[Path], *, on_long: Literal["chunk", "error"] = "chunk", progress: bool = False
    ) -> AdaptReport:
        """Remembers the documents of files, as `MACEngine.adapt` does.

        All documents are checked and amortized before the first is committed, so bad input changes nothing. After an
        interruption, the same call continues.

        Args:
            files: files as for `mac_rag.data.readers.read_documents`, without standard input.
            on_long: for a document beyond the model's limit: split it into chunks, or raise an error.
            progress: shows a progress bar.

        Raises:
            ConfigError: if Ray is missing, its cluster cannot be reached, or a worker does not see the same files; for
                standard input.
            DataError: as `read_documents`, and for a file that changes during the call.
            DocumentError, BankError: as `MACEngine.adapt`. But if documents of several groups supersede each other in a
                circle, the error comes when the last of these groups is committed, after the groups before it.
            WorkerError: if a group's workers die repeatedly, or a worker fails with an error that is no `MACError`.
        """
        if STDIN in files:
            raise ConfigError("standard input (-) cannot be read by several processes; write it to a file first")
        self._finish()
        ray = _quietly_connected()
        job = BulkJob(Path.cwd(), tuple(files), self._name, self._model.fingerprint, on_long)
        with _quiet():
            pending = _Pending(self._synced)
            with progress_bar("read", disable=not progress) as bar:
                for found in _found(ray, job):
                    pending.add(found)
                    bar.advance(len(found))
            pending.end()
            with Staging(self._path) as staging:
                blocks = self._amortize(ray, job, pending, staging, progress)
                report = self._commit(job, pending, staging, blocks, progress)
                staging.remove()
        return report

    def _finish(self) -> None:
        """Finishes a change that was interrupted between retriever and bank."""
        bank = self._synced.bank
        if bank.intent and (count := self._synced.finish(partial(self._writer.remember, bank))):
            _log.warning("finished an interrupted change of retriever and bank: %d documents", count)

    def _amortize(self, ray: Any, job: BulkJob, pending: _Pending, staging: Staging, progress: bool) -> dict[int, str]:
        """Has the blocks written that are not there; returns the name of each by the number of its group."""
        finished = staging.finished()
        keys = {number: job.key(group) for number, group in enumerate(pending.groups) if any(group.lacking)}
        blocks = {number: finished[key] for number, key in keys.items() if key in finished}
        staging.discard(keep=set(blocks.values()))
        missing = [(number, pending.groups[number]) for number in keys if number not in blocks]
        total = sum(map(sum, (pending.groups[number].lacking for number in keys)))
        done = total - sum(sum(group.lacking) for _, group in missing)
        with progress_bar("adapt", total, done=done, disable=not progress) as bar:
            for message in self._amortized(ray, job, missing, staging) if missing else ():
                blocks[message["number"]] = message["block"]
                bar.advance(sum(pending.groups[message["number"]].lacking))
        return blocks

    def _amortized(
        self, ray: Any, job: BulkJob, missing: Sequence[tuple[int, Group]], staging: Staging
    ) -> Iterator[dict[str, Any]]:
        from ray.data import ActorPoolStrategy

        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        there = max(1, gpus or int(resources.get("CPU", 1)) // CPUS)
        most = min(self._actors or there, len(missing))
        groups = _dataset(ray, [{"number": number, "group": group} for number, group in missing])
        blocks = groups.map_batches(
            Amortizer,
            batch_size=1,
            fn_constructor_args=(job, staging.folder),
            compute=ActorPoolStrategy(min_size=1, max_size=most, initial_size=min(most, there)),
            num_cpus=CPUS,
            num_gpus=1 if gpus else None,
        )
        return _messages(blocks)

    def _commit(
        self, job: BulkJob, pending: _Pending, staging: Staging, blocks: dict[int, str], progress: bool
    ) -> AdaptReport:
        """Puts the groups into retriever and bank, one after another."""
        if pending.groups:
            self._synced.bank.commit()  # raises for a bank that is not writable, before anything changes
        count = 0
        forgotten: list[str] = []
        with progress_bar("commit", sum(len(group.lacking) for group in pending.groups), disable=not progress) as bar:
            for number, group in enumerate(pending.groups):
                documents = group.read(job.files)
                if any(document.supersedes for document in documents):
                    members = {document.id: Member.of(document) for document in documents}
                    check_supersession(members, self._synced.bank)
                phi, rows = None, {}
                if number in blocks:
                    new = group.new(documents)
                    phi, counts = staging.read(blocks[number], len(new), self._model.row_shape)
                    rows = {document.id: own for document, own in zip(new, counts)}
                    count += len(phi)
                forgotten += self._writer.write_encoded(self._synced, documents, phi, rows, pending.unfiled)
                if number in blocks:
                    staging.drop(blocks[number])
                bar.advance(len(documents))
        return AdaptReport(
            pending.lacking - pending.updated,
            pending.updated,
            len(pending.ids) - pending.lacking,
            count,
            tuple(forgotten),
            len(pending.unfiled),
        )


class _Pending:
    """The documents that bank or retriever lack, in order and in the groups of `MACEngine.adapt`.

    Args:
        synced: bank and retriever.

    Attributes:
        ids: the ids of all documents.
        groups: the groups.
        unfiled: ids of documents that the retriever lacks.
        lacking: number of documents that the bank lacks.
        updated: number of these of which the bank holds another version.
    """

    def __init__(self, synced: SyncedBank) -> None:
        self.ids: set[str] = set()
        self.groups: list[Group] = []
        self.unfiled: set[str] = set()
        self.lacking = self.updated = 0
        self._synced = synced
        self._open: list[tuple[Found, bool]] = []  # of a group that is not full

    def add(self, found: Sequence[Found]) -> None:
        """Adds the next documents.

        Raises:
            BankError: for an id that occurred before.
        """
        for each in found:
            if each.id in self.ids:
                raise BankError(f"document id {shown_id(each.id)} occurs twice; ids must be unique")
            self.ids.add(each.id)
        bank = self._synced.bank
        lacking = {each.id for each in found if not is_held(bank, each.id, each.content_hash)}
        unfiled = self._synced.unfiled({each.id: each.content_hash for each in found}, lacking)
        self.lacking += len(lacking)
        self.updated += sum(document_id in bank for document_id in lacking)
        self.unfiled |= unfiled
        self._open += [(each, each.id in lacking) for each in found if each.id in lacking or each.id in unfiled]
        while len(self._open) >= GROUP:
            self._close(GROUP)

    def end(self) -> None:
        """Closes the last group."""
        if self._open:
            self._close(len(self._open))

    def _close(self, count: int) -> None:
        found, lacking = zip(*self._open[:count])
        del self._open[:count]
        self.groups.append(Group.of(found, lacking))


def _found(ray: Any, job: BulkJob) -> Iterator[list[Found]]:
    """The documents of all files in their order."""
    if not job.files:
        return
    files = _dataset(ray, [{"file": number} for number in range(len(job.files))])
    looked_at = files.map_batches(find_documents, batch_size=1, fn_kwargs={"job": job}, num_cpus=1)
    for message in _messages(looked_at, in_order=True):
        yield [Found(*fields) for fields in message["found"]]


def _dataset(ray: Any, messages: Sequence[Any]) -> Any:
    import ray.data

    return ray.data.from_items(list(map(to_row, messages)), override_num_blocks=min(len(messages), _MOST_TASKS))


def _messages(dataset: Any, *, in_order: bool = False) -> Iterator[Any]:
    """The messages of a Ray data set, as they arrive or in the order of the messages they were made from.

    Raises:
        MACError: for the first message that is an error.
        WorkerError: if Ray fails.
    """
    dataset.context.enable_progress_bars = False
    dataset.context.print_on_execution_start = False
    dataset.context.execution_options.preserve_order = in_order
    with closing(iter(dataset.iter_rows())) as rows:
        while True:
            try:
                row = next(rows, None)
            except Exception as error:  # Ray has many errors without a common class
                detail = str(error).strip().splitlines() or ["no reason given"]
                raise WorkerError(
                    f"Ray failed: {type(error).__name__}: {detail[0][:500]}; finished work is kept, so run the command "
                    "again"
                ) from error
            if row is None:
                return
            yield from_row(row)


def _quietly_connected() -> Any:
    """The module `ray`, connected, with a core that writes errors it repairs by itself to its log only.

    The core reports this setting once on standard error; that line is discarded.
    """
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    sys.stderr.flush()
    terminal, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        return connected_ray()
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(nowhere)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Ray Data's reports off the terminal; they are in its log."""
    import ray.data  # sets up its log

    logger = logging.getLogger(ray.data.__name__)
    handlers = [handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler)]
    levels = [handler.level for handler in handlers]
    for handler in handlers:
        handler.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for handler, level in zip(handlers, levels):
            handler.setLevel(level)
