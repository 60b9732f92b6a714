"""A memory bank whose documents lie in several shards: processes on one machine, or on several machines."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Self
from weakref import WeakSet

import torch
from torch import Tensor

from mac_rag.bank.bank import MemoryBank
from mac_rag.bank.directory import Directory
from mac_rag.bank.entries import described_members
from mac_rag.bank.interface import Intent
from mac_rag.bank.rows import NewRows
from mac_rag.data.types import Document
from mac_rag.distributed.directory import ShardDirectory
from mac_rag.distributed.messages import ShardChange, ShardContents, to_array
from mac_rag.distributed.reader import ShardedReader
from mac_rag.distributed.shard_files import SHARDS
from mac_rag.distributed.sharded_contents import ShardedContents
from mac_rag.distributed.transport import ActorOptions, RayShards, Request, ShardSettings, StartShards, WatchedShards
from mac_rag.errors import BankError, ShardLostError

if TYPE_CHECKING:
    from mac_rag.config import AttentionConfig
    from mac_rag.model import AmortizedModel, MACModel


class ShardedSnapshot(ShardedContents):
    """The contents of a bank in shards at one moment; later changes of the bank do not affect it.

    The shards keep the states that it refers to as long as it is in use.

    Attributes:
        holders: how many use it: each has taken it from the bank, and not released it.
    """

    holders = 0

    def release(self) -> None:
        """Lets the shards drop the states that it refers to, if nobody else uses it."""
        self.holders = max(0, self.holders - 1)

    @cached_property
    def directory(self) -> Directory:
        """As `ShardedContents.directory`, made once."""
        return super().directory

    def reader(self, model: AmortizedModel, config: AttentionConfig) -> ShardedReader:
        """See `mac_rag.bank.base_reader.BringsReader`."""
        return ShardedReader(model, self, config)


class ShardedBank(ShardedContents):
    """A bank in N shards. A document's id determines the shard that holds it, and a question attends to all shards.

    Each shard is an ordinary bank in its own process, with one folder under the bank's folder. A question costs two
    round trips to all shards for each block of the aggregation network, and its result equals that of one bank with all
    documents, up to rounding. This process keeps ids, hashes and metadata of all documents; memory tokens stay in the
    shards. Documents are in the order of the shards, and within a shard in the order of arrival.

    Each shard commits by itself. So after an error or a crash during `commit`, some shards may have committed and
    others not: repeat the call that failed, such as `MACEngine.adapt`, and it does the rest.

    A lost shard restarts from its folder, at its last commit. Meanwhile, a question raises `ShardLostError`.

    Args:
        settings: how the shards are opened.
        start: makes the shards' transport.
        create: True for a new bank.

    Attributes:
        commits: number of commits of this object.

    Raises:
        BankError, FingerprintError: as `open`.
    """

    def __init__(self, settings: ShardSettings, start: StartShards, *, create: bool = False) -> None:
        shards = WatchedShards(settings, start, create=create)
        found = [ShardDirectory(contents) for contents in shards.opened]
        super().__init__(shards, settings.manifest.fingerprint, found, 0)
        if create:
            settings.manifest.write(settings.folder / SHARDS)
        self._settings = settings
        self._intent = settings.manifest.intent
        self.commits = 0
        self._look = threading.RLock()  # held briefly, never while a shard is asked
        self._dirty: set[int] = set()  # shards with uncommitted changes
        self._undone: set[int] = set()  # shards that lost their changes, so that all must be rolled back
        self._must_finish = False  # True if only some shards committed a change of bank and retriever
        self._snapshots: WeakSet[ShardedSnapshot] = WeakSet()
        self._on_disk = [directory.copy() for directory in found]
        self._committed = self._snapshot_of(self.directories)

    @classmethod
    def create(
        cls,
        folder: str | Path,
        model: MACModel,
        *,
        shards: int,
        actor_options: ActorOptions | None = None,
    ) -> Self:
        """Makes a new, empty bank and opens it for writing.

        Args:
            folder: folder of the bank, which all machines must see under this path; created if missing.
            model: the model that writes and reads the bank.
            shards: number of shards. It can never change, because it decides where documents lie.
            actor_options: as for `open`.

        Raises:
            BankError: if the folder already holds a bank or shards.
            ConfigError: for an impossible number of shards, and for a model that is not amortized; without Ray.
        """
        settings = ShardSettings.of_new(Path(folder).absolute(), model, shards)
        return cls(settings, partial(RayShards, options=actor_options), create=True)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        model: MACModel,
        *,
        write: bool = False,
        actor_options: ActorOptions | None = None,
    ) -> Self:
        """Opens a bank at the last commits of its shards.

        Args:
            folder: folder of the bank.
            model: the model that wrote the bank.
            write: True to change the bank. Only one process can write to it at a time.
            actor_options: function from a shard's number to its Ray actor's options, such as `num_gpus` or `resources`.

        Raises:
            BankError: if there is no bank; if a shard is missing, damaged, in another's place, or open for writing in
                another process. The message names the shard's folder.
            ConfigError: without Ray.
            FingerprintError: if another model wrote it.
        """
        settings = ShardSettings.of(Path(folder).absolute(), model, write=write)
        return cls(settings, partial(RayShards, options=actor_options))

    @property
    def writable(self) -> bool:
        """True if the bank can be changed."""
        return self._settings.write

    @property
    def intent(self) -> Intent:
        """The change of bank and retriever that the last commit announced; empty if none is under way."""
        return self._intent

    @property
    def committed(self) -> ShardedSnapshot:
        """The contents after the last commit."""
        self.shards.take_restarted(self._take, wait=False)
        with self._look:
            self._committed.holders += 1
            return self._committed

    def snapshot(self) -> ShardedSnapshot:
        """The current contents, including uncommitted changes; later changes of the bank do not affect the snapshot."""
        self.shards.take_restarted(self._take, wait=False)
        with self._look:
            snapshot = self._snapshot_of(self.directories)
            snapshot.holders += 1
            return snapshot

    def _snapshot_of(self, directories: Sequence[ShardDirectory]) -> ShardedSnapshot:
        with self._look:
            states = [directory.version for directory in directories]
            for snapshot in self._snapshots:
                if snapshot.states == states:
                    return snapshot
            self.version += 1
            copies = [directory.copy() for directory in directories]
            snapshot = ShardedSnapshot(self.shards, self.fingerprint, copies, self.version)
            self._snapshots.add(snapshot)
            return snapshot

    def put(self, documents: Sequence[Document], phi: NewRows, rows: Sequence[int] | None = None) -> tuple[str, ...]:
        """Adds documents and replaces those with the same ids; see `MemoryBank.put`.

        Raises:
            BankError: as `MemoryBank.put`; the bank has not changed.
            ShardLostError: if a shard is lost during the call; call `rollback` before anything else.
        """
        self._check_changeable()
        if not isinstance(phi, Tensor):
            raise BankError("a bank in shards holds no codes of keys and values; put them into a bank in one file")
        counts = [1] * len(documents) if rows is None else list(rows)
        MemoryBank(self.fingerprint).put(documents, phi, counts)  # finds errors before any shard changes
        shape = tuple(phi.shape[1:])
        held = next((one.row_shape for one in self.directories if one.row_shape is not None), shape)
        if shape != held:
            raise BankError(
                f"memory tokens of shape {list(shape)} do not fit this bank, whose rows have shape {list(held)}; "
                "encode the documents with the model that wrote the bank"
            )
        places: dict[int, list[int]] = {}
        for place, document in enumerate(documents):
            places.setdefault(self._number(document.id), []).append(place)
        parts = phi.split(counts)
        changes = self._changed(
            {
                number: Request(
                    "put",
                    (
                        self._kept(number),
                        [documents[place] for place in own],
                        to_array(torch.cat([parts[place] for place in own])),
                        [counts[place] for place in own],
                    ),
                )
                for number, own in places.items()
            },
            (shape[0], shape[1]),
        )
        return tuple(name for number in sorted(changes) for name in changes[number].returned)

    def describe(self, documents: Sequence[Document]) -> None:
        """Replaces the metadata of documents, such as the date; see `MemoryBank.describe`.

        Raises:
            BankError: as `MemoryBank.describe`; the bank has not changed.
            ShardLostError: if a shard is lost during the call; call `rollback` before anything else.
        """
        self._check_changeable()
        described_members(documents, lambda name: self[name].members)  # finds errors before any shard changes
        own: dict[int, list[Document]] = {}
        for document in documents:
            own.setdefault(self._number(document.id), []).append(document)
        self._changed({number: Request("describe", (self._kept(number), some)) for number, some in own.items()})

    def delete(self, document_id: str) -> tuple[str, ...]:
        """Deletes a document with all its rows; see `MemoryBank.delete`.

        Raises:
            BankError: for an id that the bank does not hold.
            ShardLostError: if its shard is lost; call `rollback` before anything else.
        """
        self._check_changeable()
        if document_id not in self:
            raise BankError(f"the bank holds no document {document_id!r}")
        number = self._number(document_id)
        return self._changed({number: Request("delete", (self._kept(number), document_id))})[number].returned

    def _changed(
        self, requests: Mapping[int, Request], row_shape: tuple[int, int] | None = None
    ) -> dict[int, ShardChange]:
        """Changes shards; after an error in one, all must be rolled back."""
        self._dirty |= requests.keys()
        outcomes = self.shards.ask(requests)
        errors = [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]
        with self._look:
            for number, outcome in outcomes.items():
                if isinstance(outcome, ShardChange):
                    self.directories[number].changed(outcome, row_shape)
            if errors:
                self._undone |= requests.keys()
        if errors:
            raise errors[0]
        return outcomes

    def commit(self, intent: Intent | None = None) -> None:
        """Writes all changes to disk, shard by shard.

        Args:
            intent: as for `MemoryBank.commit`. It is written before the shards commit, and cleared once all have.

        Raises:
            BankError: if the bank is not open for writing, or a shard or the disk refuses the write. Other shards may
                have committed: call `rollback` and repeat the change.
            ShardLostError: if a shard is lost. Call `rollback` and repeat the change.
        """
        self._check_changeable()
        announced = self.intent if intent is None else _both(self.intent, intent)
        if self._dirty and announced != self.intent:
            self._announce(announced)
        if self._must_finish and intent is not None and intent != self.intent:
            raise BankError(f"{self.path} has committed only a part of a change; call adapt or reconcile to finish it")
        # A shard that has lost its changes is noticed before another has committed.
        self.shards.done({number: Request("check") for number in sorted(self._dirty)})
        failed = self._commit_shards()
        if failed is not None:
            raise failed
        self._must_finish = False
        if intent is not None and intent != self.intent:
            self._announce(intent)
        self.commits += 1

    def _commit_shards(self) -> Exception | None:
        """Commits the shards that have changed; returns the first error."""
        outcomes = self.shards.ask({number: Request("commit") for number in sorted(self._dirty)})
        errors = [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)]
        with self._look:
            for number, outcome in outcomes.items():
                if isinstance(outcome, Exception):
                    self._undone.add(number)
                else:
                    self._dirty.discard(number)
                    self._on_disk[number] = self.directories[number].copy()
            self._committed = self._snapshot_of(self._on_disk)
        if errors and self.intent and len(errors) < len(outcomes):
            # Whether the retriever completes the change or reverts it, the bank has to follow.
            names = tuple(dict.fromkeys((*self.intent.puts, *self.intent.deletes)))
            self._must_finish = True
            self._announce(Intent(puts=names, deletes=names))
        return errors[0] if errors else None

    def _announce(self, intent: Intent) -> None:
        self._settings.manifest.model_copy(update={"intent": intent}).write(self._settings.folder / SHARDS)
        self._intent = intent

    def rollback(self) -> None:
        """Drops all changes since the last commit of each shard. A lost shard has already dropped its own."""
        numbers = sorted(self._dirty)
        outcomes = self.shards.ask({number: Request("rollback", (self._kept(number),)) for number in numbers})
        with self._look:
            for number in numbers:
                directory = self._on_disk[number].copy()
                if isinstance(outcomes.get(number), ShardChange):
                    directory.version = outcomes[number].version
                    self._on_disk[number] = directory.copy()
                self.directories[number] = directory
            self._dirty.clear()
            self._undone.clear()
            self._committed = self._snapshot_of(self._on_disk)
        for outcome in outcomes.values():
            if isinstance(outcome, Exception) and not isinstance(outcome, ShardLostError):
                raise outcome

    def compact(self) -> None:
        """Commits, and compacts each shard; see `MemoryBank.compact`.

        Raises:
            BankError: as `MemoryBank.compact`; other shards may have been compacted.
        """
        self.commit()
        self.shards.done({number: Request("compact", (self._kept(number),)) for number in self.shards.numbers})

    def refresh(self) -> bool:
        """Moves a bank that is open for reading to the last commits of its shards.

        Returns:
            True if there was a new commit.

        Raises:
            BankError: if a shard is damaged on disk, or lost; the others may have moved to their last commits.
        """
        if self.writable:
            return False
        requests = {number: Request("refresh", (self._kept(number),)) for number in self.shards.numbers}
        outcomes = self.shards.ask(requests)
        with self._look:
            for number, outcome in outcomes.items():
                if isinstance(outcome, ShardContents):
                    self._take(number, outcome)
        for outcome in outcomes.values():
            if isinstance(outcome, Exception):
                raise outcome
        return any(outcome is not None for outcome in outcomes.values())

    def close(self) -> None:
        """Ends the shards and drops uncommitted changes. Afterwards the bank can no longer be read."""
        self.shards.close()

    def _take(self, number: int, contents: ShardContents) -> None:
        """Replaces the directory of a shard by its contents on disk."""
        with self._look:
            self.directories[number] = ShardDirectory(contents)
            self._on_disk[number] = self.directories[number].copy()
            self._committed = self._snapshot_of(self._on_disk)
            if number in self._dirty:
                self._undone.add(number)

    def _kept(self, number: int) -> set[int]:
        """Versions of a shard that snapshots still use."""
        opening, _ = self.directories[number].version
        with self._look:
            used = [one for one in self._snapshots if one.holders or one is self._committed]
            states = [snapshot.states[number] for snapshot in used]
        return {version for name, version in states if name == opening}

    def _check_changeable(self) -> None:
        if not self.writable:
            raise BankError(f"{self.path} is not open for writing; open it with write=True")
        self.shards.take_restarted(self._take, wait=True)
        if self._undone:
            raise BankError(
                f"a change of {self.path} failed in shard {', '.join(map(str, sorted(self._undone)))}; call "
                "rollback() and repeat the change"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _both(first: Intent, second: Intent) -> Intent:
    return Intent(
        puts=tuple(dict.fromkeys((*first.puts, *second.puts))),
        deletes=tuple(dict.fromkeys((*first.deletes, *second.deletes))),
    )
