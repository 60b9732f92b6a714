"""The documents of all shards together, as the asking process knows them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mac_rag.bank.bank import rows_allowed
from mac_rag.bank.directory import Directory
from mac_rag.bank.entries import Entry
from mac_rag.bank.interface import BankContents
from mac_rag.bank.known_documents import KnownDocuments
from mac_rag.distributed.directory import ShardDirectory, ShardedEntry
from mac_rag.distributed.messages import Version
from mac_rag.distributed.shard_files import check_fingerprint, shard_of
from mac_rag.distributed.transport import Request, WatchedShards
from mac_rag.errors import BankError


class ShardedContents:
    """The documents of all shards, in the order of the shards, and within a shard in the order of arrival.

    Args:
        shards: the shards.
        fingerprint: fingerprint of the model that wrote them.
        directories: the directory of each shard.
        version: see below.

    Attributes:
        shards: the shards.
        directories: the directory of each shard.
        version: a number that grows with every change of the bank.
    """

    keep_texts = False

    def __init__(
        self,
        shards: WatchedShards,
        fingerprint: str,
        directories: Sequence[ShardDirectory],
        version: int,
    ) -> None:
        self.shards = shards
        self.path: Path = shards.folder
        self.fingerprint = fingerprint
        self.directories = list(directories)
        self.version = version

    @property
    def states(self) -> list[Version]:
        """The state of each shard."""
        return [directory.version for directory in self.directories]

    @property
    def phi(self) -> Tensor:
        """Memory tokens of all rows `[N, T, D]`, fetched from the shards at each access, as they are now.

        Raises:
            BankError: for an empty bank.
        """
        if not len(self):
            raise BankError("the memory bank is empty; adapt to some documents first")
        found = self.shards.done({number: Request("memory_tokens", (None,)) for number in self.shards.numbers})
        return torch.cat([torch.tensor(found[number]) for number in self.shards.numbers if found[number] is not None])

    def memory_tokens(self, document_id: str) -> Tensor:
        """Memory tokens `[rows, T, D]` of the entry of a document, fetched from its shard, as they are now."""
        number = self._number(document_id)
        return torch.tensor(self.shards.done({number: Request("memory_tokens", (document_id,))})[number])

    def check_model(self, fingerprint: str) -> None:
        """Refuses a model that did not write this bank.

        Raises:
            FingerprintError: if the fingerprints differ; the message names both.
        """
        check_fingerprint(self.path, self.fingerprint, fingerprint)

    @property
    def document_ids(self) -> list[str]:
        """Ids of all documents, shard by shard, in the order of their entries."""
        return [
            name
            for directory in self.directories
            for record in directory.records.values()
            for name in record.document_ids
        ]

    @property
    def row_members(self) -> list[tuple[str, ...]]:
        """For each row the ids of the documents that it represents, shard by shard."""
        return [
            members
            for directory in self.directories
            for record in directory.records.values()
            for members in [record.document_ids] * record.rows
        ]

    def ids_at(self, places: Sequence[int]) -> list[str]:
        """Ids of some documents, by their places in the directory."""
        ids = self.document_ids
        return [ids[place] for place in places]

    @property
    def supersedes(self) -> bool:
        """True if a document supersedes another, even one that the bank does not hold."""
        return any(directory.superseded for directory in self.directories)

    @property
    def directory(self) -> Directory:
        """All documents, shard by shard, with their dates and what they supersede."""
        return Directory.cat([one.directory for one in self.directories])

    def visible_rows(self, allowed: Container[str]) -> Tensor:
        """Which rows represent allowed documents only, bool `[N]`."""
        if isinstance(allowed, KnownDocuments):
            return allowed.rows_of(self)
        return rows_allowed(self.row_members, allowed)

    def renewed(self, former: BankContents) -> BankContents:
        """See `mac_rag.bank.bank.Snapshot.renewed`."""
        return self

    def release(self) -> None:
        """See `mac_rag.bank.bank.Snapshot.release`."""

    def __getitem__(self, document_id: str) -> ShardedEntry:
        directory = self._directory(document_id)
        if document_id not in directory.sequences:
            raise BankError(f"the bank holds no document {document_id!r}")
        return self._entry(directory.records[directory.sequences[document_id]])

    def __iter__(self) -> Iterator[ShardedEntry]:
        for directory in self.directories:
            for record in directory.records.values():
                yield self._entry(record)

    def _entry(self, record: Entry) -> ShardedEntry:
        return ShardedEntry(record.members, record.sequence, record.rows, self.memory_tokens)

    def __len__(self) -> int:
        return sum(len(directory.sequences) for directory in self.directories)

    def __contains__(self, document_id: object) -> bool:
        return isinstance(document_id, str) and document_id in self._directory(document_id).sequences

    def _directory(self, document_id: str) -> ShardDirectory:
        return self.directories[self._number(document_id)]

    def _number(self, document_id: str) -> int:
        return shard_of(document_id, len(self.directories))
