"""Which entries a part of a bank has: numbers in tensors, and records that are made when somebody asks for them."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from mac_rag.memory.records import Record
from mac_rag.memory.rows import Growing


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

    def copy(self) -> RecordList:
        """A table that grows apart from this one."""
        other = copy.copy(self)
        other._records, other._numbers = list(self._records), dict(self._numbers)
        other._sequences, other._starts = Growing(self.sequences), Growing(self.starts)
        other._documents = Growing(self.documents)
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
        """As `EntryTable.id_hashes`; computed at each access."""
        return id_hashes([name for record in self._records for name in record.document_ids])


def id_hash(document_id: str) -> int:
    """A number of 64 bits, with sign, by which a document is found: the first 8 bytes of blake2b of its id."""
    digest = hashlib.blake2b(document_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def id_hashes(document_ids: Sequence[str]) -> Tensor:
    """`id_hash` of each document, int64 `[n]`."""
    return torch.tensor([id_hash(name) for name in document_ids], dtype=torch.long)
