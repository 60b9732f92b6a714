"""Which entries a part of a bank has: numbers in tensors, and records that are made when somebody asks for them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from mac_rag.data.document_ids import id_hash
from mac_rag.data.provenance import Member
from mac_rag.memory.rows import Growing


@dataclass(frozen=True, slots=True)
class Record:
    """An entry of the bank without its memory tokens.

    Attributes:
        sequence: the entry's number in the order of arrival; never used for another entry.
        rows: number of rows of memory tokens.
        members: the documents that the entry stands for: one, or several that were merged.
    """

    sequence: int
    rows: int
    members: tuple[Member, ...]

    @property
    def document_ids(self) -> tuple[str, ...]:
        """Ids of the members."""
        return tuple(member.document_id for member in self.members)


class Dating(NamedTuple):
    """When d documents count, and which others they supersede.

    Attributes:
        dates: int64 `[d]`, `Member.moment` of each document, entry by entry.
        superseded: int64 `[s]`, `id_hash` of each document that one of them supersedes; it may be in no bank.
        superseding: int64 `[s]`, the place of the document that supersedes it among the d, ascending.
    """

    dates: Tensor
    superseded: Tensor
    superseding: Tensor

    @classmethod
    def of(cls, members: Iterable[Member]) -> Dating:
        """That of documents in their order."""
        dates: list[int] = []
        superseded: list[int] = []
        superseding: list[int] = []
        for place, member in enumerate(members):
            dates.append(member.moment)
            names = member.supersedes
            superseded += map(id_hash, names)
            superseding += [place] * len(names)
        return cls(*(torch.tensor(column, dtype=torch.long) for column in (dates, superseded, superseding)))

    @classmethod
    def cat(cls, parts: Sequence[Dating]) -> Dating:
        """That of the documents of several parts, in order."""
        before = [0, *accumulate(len(part.dates) for part in parts)]
        nothing = torch.empty(0, dtype=torch.long)
        return cls(
            torch.cat([nothing, *(part.dates for part in parts)]),
            torch.cat([nothing, *(part.superseded for part in parts)]),
            torch.cat([nothing, *(part.superseding + first for part, first in zip(parts, before))]),
        )

    def kept(self, mask: Tensor) -> Dating:
        """That of the documents where `mask` `[d]` is True."""
        is_kept = mask[self.superseding]
        places = mask.cumsum(0) - 1
        return Dating(self.dates[mask], self.superseded[is_kept], places[self.superseding[is_kept]])


class EntryTable(ABC):
    """m entries in the order of their sequence numbers, whether or not they were deleted since.

    Attributes:
        sequences: int64 `[m]`, ascending.
        starts: int64 `[m + 1]`, the number of each entry's first row, and the number of all rows.
        documents: int64 `[m + 1]`, the number of documents before each entry, and of all documents.
    """

    sequences: Tensor
    starts: Tensor
    documents: Tensor

    def __len__(self) -> int:
        """m."""
        return len(self.sequences)

    @abstractmethod
    def record(self, number: int) -> Record:
        """The record of an entry by its number here.

        Raises:
            DamageError: when it is on disk, and is not what was written.
        """

    @abstractmethod
    def find(self, document_id: str) -> tuple[int, Record] | None:
        """The number and the record of the last entry with a document; None if there is none.

        Raises:
            DamageError: as `record`.
        """

    @property
    @abstractmethod
    def id_hashes(self) -> Tensor:
        """Int64 `[d]`, `id_hash` of each document, entry by entry."""

    @property
    @abstractmethod
    def dating(self) -> Dating:
        """When the documents count, and which others they supersede."""

    def number(self, sequence: int) -> int | None:
        """The number of the entry with a sequence number; None if there is none."""
        number = int(torch.searchsorted(self.sequences, sequence))
        return number if number < len(self) and int(self.sequences[number]) == sequence else None

    def start(self, number: int) -> int:
        """The number of an entry's first row."""
        return int(self.starts[number])


class RecordList(EntryTable):
    """Entries whose records are in memory, to which others can be appended.

    Args:
        records: the records, in order.
    """

    def __init__(self, records: Sequence[Record] = ()) -> None:
        self._records: list[Record] = []
        self._numbers: dict[str, int] = {}  # document id -> number of its last entry
        self._sequences, self._starts, self._documents = (
            Growing(torch.zeros(first, dtype=torch.long)) for first in (0, 1, 1)
        )
        self._hashes, *self._dating = (Growing(torch.empty(0, dtype=torch.long)) for _ in range(4))
        self.extend(records)

    def extend(self, records: Sequence[Record]) -> None:
        """Appends entries. Tensors that the table has given never change."""
        self._numbers |= {
            name: number for number, record in enumerate(records, len(self._records)) for name in record.document_ids
        }
        self._records += records
        self._sequences.append(torch.tensor([record.sequence for record in records], dtype=torch.long))
        for column, counts in (
            (self._starts, [record.rows for record in records]),
            (self._documents, [len(record.members) for record in records]),
        ):
            column.append(column.tensor[-1] + torch.tensor(counts, dtype=torch.long).cumsum(0))
        self.sequences, self.starts = self._sequences.tensor, self._starts.tensor
        self.documents = self._documents.tensor
        members = [member for record in records for member in record.members]
        before = len(self._hashes.tensor)
        self._hashes.append(id_hashes([member.document_id for member in members]))
        dates, superseded, superseding = Dating.of(members)
        for own, more in zip(self._dating, (dates, superseded, superseding + before)):
            own.append(more)

    def copy(self) -> RecordList:
        """A table that grows apart from this one."""
        other = copy.copy(self)
        other._records, other._numbers = list(self._records), dict(self._numbers)
        other._sequences, other._starts = Growing(self.sequences), Growing(self.starts)
        other._documents, other._hashes = Growing(self.documents), Growing(self._hashes.tensor)
        other._dating = [Growing(column.tensor) for column in self._dating]
        return other

    def record(self, number: int) -> Record:
        """As `EntryTable.record`; never an error."""
        return self._records[number]

    def find(self, document_id: str) -> tuple[int, Record] | None:
        """As `EntryTable.find`; never an error."""
        number = self._numbers.get(document_id)
        return None if number is None else (number, self._records[number])

    @property
    def id_hashes(self) -> Tensor:
        """As `EntryTable.id_hashes`."""
        return self._hashes.tensor

    @property
    def dating(self) -> Dating:
        """As `EntryTable.dating`."""
        return Dating(*(column.tensor for column in self._dating))


def id_hashes(document_ids: Sequence[str]) -> Tensor:
    """`id_hash` of each document, int64 `[n]`."""
    return torch.tensor([id_hash(name) for name in document_ids], dtype=torch.long)
