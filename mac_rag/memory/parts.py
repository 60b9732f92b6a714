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

from mac_rag.memory.entry_table import Dating, EntryTable, Record, RecordList
from mac_rag.memory.known_documents import Timeline
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
        table: the entries.
        texts: the texts of entries by sequence number.

    Attributes:
        table: the entries, deleted ones included.
        tombstones: sequence numbers of the deleted entries.
        count: number of live rows.
        documents: number of documents of live entries.
    """

    def __init__(self, rows: Rows, table: EntryTable, texts: Mapping[int, Texts] | None = None) -> None:
        self.table = table
        self.tombstones: list[int] = []
        self.count = 0
        self.documents = 0
        self._rows = GrowingRows(rows)
        self._keys = Growing(torch.empty(0, dtype=torch.long))
        self._alive = Growing(torch.empty(0, dtype=torch.bool))  # for each row
        self._live_entries = Growing(torch.empty(0, dtype=torch.bool))
        self._texts: dict[int, Texts] = dict(texts or {})
        self._live: Tensor | None = None
        self._is_shared = False
        self._take_in(0)

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
            self.tombstones = list(self.tombstones)
            self._texts = dict(self._texts)
            if isinstance(self.table, RecordList):
                self.table = self.table.copy()
            self._alive = Growing(self._alive.tensor.clone())
            self._live_entries = Growing(self._live_entries.tensor.clone())
            self._is_shared = False

    @property
    def stored(self) -> Rows:
        """All rows, deleted ones included, whether or not they were verified."""
        return self._rows.rows

    def append(self, rows: Rows, records: Sequence[Record], texts: Mapping[int, Texts]) -> None:
        """Appends entries with copies of their rows to a part in memory; `texts` has the texts of those with any."""
        self._own()
        assert isinstance(self.table, RecordList)
        known = len(self.table)
        self.table.extend(records)
        self._texts.update(texts)
        self._take_in(known)
        self._rows.append(rows)

    def __contains__(self, sequence: int) -> bool:
        """True if the entry with this sequence number is here and was not deleted."""
        return self._number(sequence) is not None

    def __getitem__(self, sequence: int) -> PlacedRecord:
        """The live entry with a sequence number.

        Raises:
            KeyError: when there is none.
            DamageError: as `EntryTable.record`.
        """
        number = self._number(sequence)
        if number is None:
            raise KeyError(sequence)
        return self._placed(number)

    def _number(self, sequence: int) -> int | None:
        """The number in the table of the live entry with a sequence number; None if there is none."""
        number = self.table.number(sequence)
        return number if number is not None and self._live_entries.tensor[number] else None

    def __iter__(self) -> Iterator[PlacedRecord]:
        """The live entries, in order.

        Raises:
            DamageError: as `EntryTable.record`.
        """
        for number in self.numbers.tolist():
            yield self._placed(number)

    def _placed(self, number: int) -> PlacedRecord:
        return PlacedRecord(self.table.record(number), self.table.start(number))

    @property
    def numbers(self) -> Tensor:
        """Numbers of the live entries in the table, int64, ascending."""
        return self._live_entries.tensor.nonzero()[:, 0]

    @property
    def sequences(self) -> Tensor:
        """Sequence numbers of the live entries, int64, ascending."""
        return self.table.sequences[self.numbers]

    @property
    def id_hashes(self) -> Tensor:
        """`id_hash` of each document of the live entries, entry by entry, int64 `[documents]`."""
        hashes = self.table.id_hashes
        return hashes[self._live_documents] if self.tombstones else hashes

    @property
    def dating(self) -> Dating:
        """When the documents of the live entries count, and which others they supersede."""
        dating = self.table.dating
        return dating.kept(self._live_documents) if self.tombstones else dating

    @property
    def supersedes(self) -> bool:
        """True if a document of a live entry supersedes another."""
        return bool(len(self.table.dating.superseding)) and bool(len(self.dating.superseding))

    @property
    def timeline(self) -> Timeline:
        """The documents of the live entries, with what says when they count."""
        if not self.tombstones:
            return Timeline.of(self.table)
        numbers = self.numbers
        members, rows = self.table.documents.diff()[numbers], self.table.starts.diff()[numbers]
        return Timeline(self.id_hashes, self.dating, members, rows)

    @property
    def _live_documents(self) -> Tensor:
        """For each document of the table whether its entry is live."""
        return self._live_entries.tensor.repeat_interleave(self.table.documents.diff())

    def find(self, document_id: str) -> PlacedRecord | None:
        """The live entry with a document; None if there is none.

        Raises:
            DamageError: as `EntryTable.record`.
        """
        found = self.table.find(document_id)
        if found is None or not self._live_entries.tensor[found[0]]:
            return None
        number, record = found
        return PlacedRecord(record, self.table.start(number))

    def entry_of(self, row: int) -> PlacedRecord:
        """The entry of a live row, by its number among the live rows.

        Raises:
            DamageError: as `EntryTable.record`.
        """
        stored = row if self.count == len(self.stored) else int(self._positions()[row])
        return self._placed(int(torch.searchsorted(self.table.starts, stored, right=True)) - 1)

    def row_numbers(self, placed: PlacedRecord) -> range:
        """The numbers of a live entry's rows among the live rows."""
        start = placed.start
        if self.count < len(self.stored):
            start = int(torch.searchsorted(self._positions(), start))
        return range(start, start + placed.record.rows)

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

    def _take_in(self, known: int) -> None:
        """Takes in the entries of the table from a number on."""
        starts = self.table.starts[known:]
        rows = starts.diff()
        within = torch.arange(int(starts[0]), int(starts[-1])) - starts[:-1].repeat_interleave(rows)
        self._keys.append((self.table.sequences[known:] << PART_BITS).repeat_interleave(rows) + within)
        self._alive.append(torch.ones(len(within), dtype=torch.bool))
        self._live_entries.append(torch.ones(len(rows), dtype=torch.bool))
        self.count += len(within)
        self.documents += int(self.table.documents[-1] - self.table.documents[known])
        self._live = None

    def tombstone(self, *sequences: int) -> None:
        """Marks live entries as deleted, each by its sequence number."""
        self._own()
        numbers = torch.searchsorted(self.table.sequences, torch.tensor(sequences, dtype=torch.long))
        starts, stops = self.table.starts[numbers], self.table.starts[numbers + 1]
        rows = stops - starts
        within = torch.arange(int(rows.sum())) - (rows.cumsum(0) - rows).repeat_interleave(rows)
        self.tombstones += sequences
        self._live_entries.tensor[numbers] = False
        self._alive.tensor[starts.repeat_interleave(rows) + within] = False
        self.count -= len(within)
        self.documents -= int((self.table.documents[numbers + 1] - self.table.documents[numbers]).sum())
        self._live = None

    def compacted(self) -> Part:
        """A new part with the live entries and their rows only."""
        records = [record for record, _ in self]
        texts = {each.sequence: self._texts[each.sequence] for each in records if each.sequence in self._texts}
        return Part(self.stored[self._positions()], RecordList(records), texts)

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
        """For each live row the ids of its documents.

        Raises:
            DamageError: as `EntryTable.record`.
        """
        for record, _ in self:
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
    return Part(Rows({"phi": torch.empty(0)}), RecordList())
