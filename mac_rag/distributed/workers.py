"""The work of a cluster's processes: finding documents in files, and amortizing them.

Both are steps of Ray Data. Their rows are messages, one JSON text each. An error is a message like any other, so that
the driver raises it with its own class, and Ray neither retries nor reports it.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from mac_rag import __version__, errors
from mac_rag.data.characters import check_text, shown_id
from mac_rag.data.provenance import Member
from mac_rag.data.readers import placed_documents
from mac_rag.data.types import Document
from mac_rag.distributed.groups import Found, Group
from mac_rag.errors import ConfigError, DocumentError, FingerprintError, MACError, WorkerError

if TYPE_CHECKING:
    from mac_rag.adapting import DocumentWriter

_log = logging.getLogger(__name__)

# Number of CPUs of an actor, and so of its threads: the bits of memory tokens can depend on the number of threads.
CPUS = 1
_AT_A_TIME = 512  # number of documents of a message
_ATTEMPTS = 4  # number of attempts at a group

Batch: TypeAlias = dict[str, Any]  # a batch of Ray Data, of one message


def to_row(message: Any) -> dict[str, str]:
    """A message as a row of Ray Data."""
    return {"message": json.dumps(message)}


def from_row(row: Mapping[str, Any]) -> Any:
    """The message of a row.

    Raises:
        MACError: if the message is an error.
    """
    message = json.loads(str(row["message"]))
    if "error" in message:
        kind, text = message["error"]
        error: type[MACError] = getattr(errors, kind)
        raise error(text)
    return message


def _batch(message: Any) -> Batch:
    return {name: [value] for name, value in to_row(message).items()}


def _message(batch: Batch) -> Any:
    return from_row({name: values[0] for name, values in batch.items()})


def _error(error: Exception) -> Batch:
    """An error as a batch; an error that is no `MACError` is also logged in this process."""
    if not isinstance(error, MACError):
        _log.exception("a worker failed")
        error = WorkerError(
            f"a worker on {platform.node()} failed: {type(error).__name__}: {error}; finished work is kept, so remove "
            "the cause and run the command again"
        )
    return _batch({"error": [type(error).__name__, str(error)]})


@dataclass(frozen=True)
class BulkJob:
    """The common settings of all workers of one call.

    Attributes:
        folder: current folder of the command, to which paths are relative.
        files: paths of all files.
        model: name or path of the model.
        fingerprint: fingerprint of the model.
        on_long: for a document beyond the model's limit: split it into chunks, or raise an error.
    """

    folder: Path
    files: tuple[Path, ...]
    model: str
    fingerprint: str
    on_long: Literal["chunk", "error"]

    def key(self, group: Group) -> str:
        """The key of a group's block."""
        return group.key(__version__, self.fingerprint, self.on_long)

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """A context in which relative paths mean the same as where the command was called."""
        with ExitStack() as stack:
            try:
                stack.enter_context(chdir(self.folder))
            except OSError as error:
                raise ConfigError(
                    f"a worker on {platform.node()} cannot enter {self.folder}: {error.strerror}; run the command in a "
                    "folder that all machines of the cluster see under the same path"
                ) from None
            yield


def find_documents(batch: Batch, job: BulkJob) -> Iterator[Batch]:
    """Looks for the documents of a file, and at each of them.

    Args:
        batch: `{"file": ...}`, the index of the file.
        job: the settings of the call.

    Yields:
        `{"found": [...]}`, fields of `Found` of a few hundred documents; or an error, as the last message.
    """
    number = _message(batch)["file"]
    try:
        with job.at_home():
            found = _found(number, job.files[number])
            while group := list(islice(found, _AT_A_TIME)):
                yield _batch({"found": group})
    except Exception as error:
        yield _error(error)


def _found(number: int, path: Path) -> Iterator[Found]:
    for place, document in placed_documents(path):
        member = Member.of(document)
        try:
            check_text(document.text)
        except DocumentError as error:
            raise DocumentError(f"document {shown_id(document.id)}: {error}") from None
        yield Found(number, place, document.id, member.content_hash)


class Amortizer:
    """Amortizes groups of documents. Each process of the pool has one, with its own copy of the model.

    Args:
        job: the settings of the call.
        staging: folder of the blocks.
    """

    def __init__(self, job: BulkJob, staging: Path) -> None:
        self._job = job
        self._staging = staging

    def __call__(self, batch: Batch) -> Batch:
        """Writes the block of a group.

        Args:
            batch: `{"number": ..., "group": [...]}`, the index of the group and its fields.

        Returns:
            `{"number": ..., "block": ...}`, the name of the block; or an error.
        """
        message = _message(batch)
        try:
            with self._job.at_home():
                block = self._amortize(Group(*message["group"]))
                return _batch({"number": message["number"], "block": block})
        except Exception as error:
            return _error(error)

    def _amortize(self, group: Group) -> str:
        from torch import Tensor

        from mac_rag.bank.bank import MemoryBank
        from mac_rag.distributed.staging import Block, write_block

        new = group.new(group.read(self._job.files))
        key = self._job.key(group)
        self._begin(key, new)
        plan = self._writer.plan(new, MemoryBank(self._job.fingerprint), self._job.on_long)
        phi = self._writer.encode(new, plan)
        assert isinstance(phi, Tensor)  # a group comes here only if the bank lacks some of it
        rows = [len(plan[document.id]) for document in new]
        return write_block(self._staging, key, Block(phi, rows))

    def _begin(self, key: str, documents: Sequence[Document]) -> None:
        """Counts the attempts at the group, because Ray would retry a group whose processes die without end."""
        from mac_rag.distributed.staging import attempt_name

        for attempt in range(_ATTEMPTS):
            try:
                (self._staging / attempt_name(key, attempt)).touch(0o600, exist_ok=False)
                return
            except FileExistsError:
                continue
        raise WorkerError(
            f"{_ATTEMPTS} workers have died over the {len(documents)} documents from {shown_id(documents[0].id)} on; "
            "if they ran out of memory, take fewer actors (--actors); finished work is kept"
        )

    @cached_property
    def _writer(self) -> DocumentWriter:
        import torch

        from mac_rag.adapting import DocumentWriter
        from mac_rag.model import MACModel

        torch.set_num_threads(CPUS)
        model = MACModel.from_pretrained(self._job.model)
        if model.fingerprint != self._job.fingerprint:
            raise FingerprintError(
                f"{self._job.model} is another model on {platform.node()} than where the command was called; install "
                "the same model on all machines of the cluster"
            )
        return DocumentWriter(model, None)
