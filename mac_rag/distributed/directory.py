"""Directories of the documents in the shards, held by the asking process: everything except memory tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from mac_rag.bank.directory import Directory
from mac_rag.bank.entries import Entry, Texts
from mac_rag.distributed.messages import ShardChange, ShardContents, Version


class ShardDirectory:
    """The entries of one shard in one state. A copy shares them until one of the two changes.

    Args:
        contents: the shard's report of its contents.

    Attributes:
        version: the state of the shard.
        records: sequence number -> entry, in the order of the entries' rows.
        sequences: document id -> sequence number of its entry.
        rows: number of rows.
        superseded: number of documents that its documents name as superseded.
        row_shape: (T, D) of a row; None until the shard has one.
    """

    def __init__(self, contents: ShardContents) -> None:
        self.version: Version = contents.version
        self.row_shape = contents.row_shape
        self.records: dict[int, Entry] = {}
        self.sequences: dict[str, int] = {}
        self.rows = self.superseded = 0
        self._is_shared = False
        self._made: list[Directory] = []  # holds the directory once it is made; shared with copies
        self._add(contents.records)

    def copy(self) -> ShardDirectory:
        """A copy that changes independently of this one."""
        self._is_shared = True
        other = object.__new__(ShardDirectory)
        other.__dict__.update(self.__dict__)
        return other

    def changed(self, change: ShardChange, row_shape: tuple[int, int] | None = None) -> None:
        """Applies a change of the shard.

        Args:
            change: the change.
            row_shape: shape `(T, D)` of the added rows; None for a change that adds no rows.
        """
        if self._is_shared:
            self.records, self.sequences, self._is_shared = dict(self.records), dict(self.sequences), False
        self.version = change.version
        self.row_shape = self.row_shape or row_shape
        for name in change.removed:
            record = self.records.pop(self.sequences.pop(name), None)
            if record is not None:
                self.rows -= record.rows
                self.superseded -= _superseded(record)
        self._made = []
        self._add(change.added)
        if change.removed:  # what was described anew keeps its place
            self.records = dict(sorted(self.records.items()))
        if not self.records:
            self.row_shape = None

    def _add(self, records: Sequence[Entry]) -> None:
        for record in records:
            self.records[record.sequence] = record
            self.sequences |= dict.fromkeys(record.document_ids, record.sequence)
            self.rows += record.rows
            self.superseded += _superseded(record)

    @property
    def directory(self) -> Directory:
        """Its documents with their dates and what they supersede, in the order of their rows; made once per state."""
        if not self._made:
            self._made.append(Directory.of(list(self.records.values())))
        return self._made[0]


def _superseded(record: Entry) -> int:
    return sum(len(member.supersedes) for member in record.members)


@dataclass(frozen=True)
class ShardedEntry(Entry):
    """An entry of a bank in shards. Its sequence number counts the arrivals in its shard."""

    _phi: Callable[[str], Tensor] = field(repr=False, compare=False)

    @property
    def phi(self) -> Tensor:
        """Memory tokens `[rows, T, D]`, fetched from the shard at each access, as they are now."""
        return self._phi(self.document_id)

    @property
    def texts(self) -> Texts:
        """None for each member: shards keep no texts."""
        return (None,) * len(self.members)
