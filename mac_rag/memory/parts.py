"""Consecutive entries of a bank with their rows side by side, some of them deleted.

A bank is a sequence of such parts: one for each segment on disk, and one that grows in memory. Rows never change: new
rows are appended, and deleting an entry leaves a tombstone, which only marks its rows; its text stays as long as they
do. So a copy of a part shares its rows, and copies the rest when either of the two changes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Self, TypeAlias

import torch
from torch import Tensor

from mac_rag.memory.records import Record
from mac_rag.memory.rows import Growing, GrowingRows, Rows

# The key of a row is its entry's sequence number and, in these low bits, its number within the entry.
PART_BITS = 16
# Up to this many deleted rows a part is not worth compacting.
_FEW = 64

Texts: TypeAlias = tuple[str | None, ...]  # the text of each document of an entry; None where none is kept


class PlacedRecord(NamedTuple):
    """A record and the number of its first row in the part."""

    record: Record
    start: int


class Part:
    """Entries in the order of their sequence numbers.

    Args:
        rows: the n rows of all entries.
        records: the records of all entries, in order.
        texts: the texts of entries by sequence number.

    Attributes:
        entries: the live entries by sequence number.
        tombstones: sequence numbers of the deleted entries.
        count: number of live rows.
    """

    def __init__(self, rows: Rows, records: Sequence[Record], texts: Mapping[int, Texts] | None = None) -> None:
        self.entries: dict[int, PlacedRecord] = {}
        self.tombstones: list[int] = []
        self.count = 0
        self._rows = GrowingRows(rows)
        self._keys = Growing(torch.empty(0, dtype=torch.long))
        self._alive = Growing(torch.empty(0, dtype=torch.bool))
        self._texts: dict[int, Texts] = {}
        self._live: Tensor | None = None
        self._is_shared = False
        self._add(records, texts or {})

    def copy(self) -> Self:
        """A copy that changes apart from this part; the two share their rows."""
        self._is_shared = True
        other = copy.copy(self)
        # Only this part goes on in its buffers; there, both would write their next rows to the same place.
        other._rows, other._keys = GrowingRows(self.stored), Growing(self._keys.tensor)
        return other

    def _own(self) -> None:
        """Copies what a change would change in copies of this part."""
        if self._is_shared:
            self.entries, self.tombstones = dict(self.entries), list(self.tombstones)
            self._texts = dict(self._texts)
            self._alive = Growing(self._alive.tensor.clone())
            self._is_shared = False

    @property
    def stored(self) -> Rows:
        """All rows, deleted ones included, whether or not they were verified."""
        return self._rows.rows

    def append(self, rows: Rows, records: Sequence[Record], texts: Mapping[int, Texts]) -> None:
        """Appends entries with copies of their rows; `texts` has the texts of those that have any."""
        self._add(records, texts)
        self._rows.append(rows)

    def entry_rows(self, placed: PlacedRecord) -> Rows:
        """The rows of an entry, verified."""
        record, start = placed
        self._verify(slice(start, start + record.rows))
        return self.stored[start : start + record.rows]

    def checksum(self, placed: PlacedRecord) -> str:
        """Sha256 of the rows of an entry, which are read for it.

        Raises:
            DamageError: when they are not what was written.
        """
        record, start = placed
        return self.stored[start : start + record.rows].checksum()

    def _verify(self, index: Tensor | slice) -> None:
        """Makes sure that some of all rows are what was written; in memory they are."""

    def texts(self, record: Record) -> Texts:
        """The texts of an entry of this part, one for each of its documents."""
        return self._texts.get(record.sequence, (None,) * len(record.members))

    def lacks_text(self, record: Record) -> bool:
        """True if the text of a document of an entry of this part is not kept."""
        return None in self.texts(record)

    def _add(self, records: Sequence[Record], texts: Mapping[int, Texts]) -> None:
        self._own()
        self._texts.update(texts)
        start = len(self._alive.tensor)
        for record in records:
            self.entries[record.sequence] = PlacedRecord(record, start)
            start += record.rows
        rows = torch.tensor([record.rows for record in records], dtype=torch.long)
        first = torch.tensor([record.sequence << PART_BITS for record in records], dtype=torch.long)
        within = torch.arange(int(rows.sum())) - (rows.cumsum(0) - rows).repeat_interleave(rows)
        self._keys.append(first.repeat_interleave(rows) + within)
        self._alive.append(torch.ones(len(within), dtype=torch.bool))
        self.count += len(within)
        self._live = None

    def tombstone(self, sequence: int) -> None:
        """Marks an entry as deleted."""
        self._own()
        record, start = self.entries.pop(sequence)
        self.tombstones.append(sequence)
        self._alive.tensor[start : start + record.rows] = False
        self.count -= record.rows
        self._live = None

    def compacted(self) -> Part:
        """A new part with the live entries and their rows only."""
        texts = {sequence: self._texts[sequence] for sequence in self.entries if sequence in self._texts}
        return Part(self.stored[self._positions()], [placed.record for placed in self.entries.values()], texts)

    @property
    def is_mostly_deleted(self) -> bool:
        """True if it is worth compacting: more rows are deleted than live, and not just a few."""
        deleted = len(self.stored) - self.count
        return deleted > max(self.count, _FEW)

    @property
    def keys(self) -> Tensor:
        """Keys of the live rows, int64 `[count]`."""
        return self._keys.tensor[self._positions()]

    def members(self) -> Iterator[tuple[str, ...]]:
        """For each live row the ids of its documents."""
        for record, _ in self.entries.values():
            for _ in range(record.rows):
                yield record.document_ids

    def rows(self, index: Tensor | slice) -> Rows:
        """Live rows by their number among the live rows, verified; views where possible.

        Raises:
            DamageError: when they are not what was written.
        """
        if self.count < len(self.stored):
            index = self._positions()[index]
        self._verify(index)
        return self.stored[index]

    def expect(self, index: Tensor | slice | None) -> None:
        """Is told that rows, or for None the overview, are read next, and after that those of other parts."""

    def overview(self) -> Rows:
        """What is kept beside the memory tokens of all live rows: summaries and lexical vectors, verified.

        A bank that keeps nothing there has no columns of it.

        Raises:
            DamageError: when they are not what was written.
        """
        overview = self.stored.overview
        return overview[self._positions()] if self.count < len(self.stored) else overview

    def _positions(self) -> Tensor:
        """The number of each live row among all rows, `[count]`."""
        if self._live is None:
            self._live = self._alive.tensor.nonzero()[:, 0]
        return self._live


def no_entries() -> Part:
    """An empty part."""
    return Part(Rows({"phi": torch.empty(0)}), ())
