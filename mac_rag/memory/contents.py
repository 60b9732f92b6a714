"""What a bank holds, read by document or by row.

All rows stand in the order of their entries' sequence numbers, so new ones come behind all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mac_rag.data.provenance import Member
from mac_rag.errors import BankError
from mac_rag.memory.parts import Part, Placed


@dataclass(frozen=True)
class BankEntry:
    """What the bank holds of one document, or of several that were merged.

    Attributes:
        members: the documents, in the order in which they arrived.
        sequence: the entry's place in the order of arrival; never used for another entry.
    """

    members: tuple[Member, ...]
    sequence: int
    _tokens: Tensor = field(repr=False, compare=False)
    _codebook: Tensor | None = field(default=None, repr=False, compare=False)

    @property
    def phi(self) -> Tensor:
        """Its memory tokens `[rows, T, D]`, read when asked for."""
        return _decoded(self._tokens, self._codebook).clone()

    @property
    def document_id(self) -> str:
        """The id of its first document."""
        return self.members[0].document_id

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of its first document."""
        return self.members[0].metadata

    @property
    def content_hash(self) -> str:
        """The content hash of its first document."""
        return self.members[0].content_hash


class Contents:
    """Entries in several parts, and where each document is.

    Args:
        codebook: `[C, D]`, where the parts hold codes.
    """

    def __init__(self, codebook: Tensor | None) -> None:
        self.codebook = codebook
        self._hold(())
        self._where: dict[str, int] = {}

    def _hold(self, parts: Sequence[Part]) -> None:
        """Makes these parts the contents, in their present state."""
        self._parts = [part for part in parts if part.count]
        self._row_keys: Tensor | None = None
        self._row_members: list[tuple[str, ...]] | None = None

    @property
    def document_ids(self) -> list[str]:
        """The ids of all documents, in order of their entries."""
        return list(self._where)

    def __getitem__(self, document_id: str) -> BankEntry:
        placed = self._placed(document_id)
        return self._entry(self._part(placed.record.sequence), placed)

    def __iter__(self) -> Iterator[BankEntry]:
        for part in self._parts:
            for placed in part.entries.values():
                yield self._entry(part, placed)

    def _entry(self, part: Part, placed: Placed) -> BankEntry:
        record, start = placed
        return BankEntry(record.members, record.sequence, part.tokens[start : start + record.rows], self.codebook)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, document_id: object) -> bool:
        return document_id in self._where

    @property
    def row_keys(self) -> Tensor:
        """A key of each row `[N]`, ascending; a row keeps its key as long as it exists."""
        if self._row_keys is None:
            self._row_keys = torch.cat([torch.empty(0, dtype=torch.long), *(part.keys for part in self._parts)])
        return self._row_keys

    @property
    def row_members(self) -> list[tuple[str, ...]]:
        """The ids of the documents that each row stands for."""
        if self._row_members is None:
            self._row_members = [members for part in self._parts for members in part.members()]
        return self._row_members

    @property
    def row_shape(self) -> tuple[int, int] | None:
        """T and D; None for an empty bank."""
        if not self._parts:
            return None
        shape = self._parts[0].tokens.shape
        return shape[1], shape[2] if self.codebook is None else self.codebook.shape[1]

    @property
    def phi(self) -> Tensor:
        """The memory tokens of all rows `[N, T, D]`.

        Raises:
            BankError: for an empty bank.
        """
        return self.read(0, self._rows())

    def read(self, start: int, stop: int) -> Tensor:
        """The memory tokens of a stretch of rows `[stop - start, T, D]`.

        Raises:
            BankError: for an empty bank.
        """
        return _decoded(self._stretch(start, stop), self.codebook)

    def codes(self, start: int, stop: int) -> Tensor:
        """The codes of a stretch of rows `[stop - start, T]`.

        Raises:
            BankError: for an empty bank, or one without a codebook.
        """
        if self.codebook is None:
            raise BankError("this bank has no codebook, so its memory tokens have no codes")
        return self._stretch(start, stop).long()

    def take(self, index: Tensor) -> Tensor:
        """The memory tokens of some rows `[n, T, D]`.

        Args:
            index: which rows `[n]`, in any order.

        Raises:
            BankError: for an empty bank.
        """
        rows = self._rows()
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < rows:
            raise IndexError(f"rows {int(index.min())} to {int(index.max())} of a bank with {rows} rows")
        tokens = self._parts[0].tokens
        taken = tokens.new_empty((len(index), *tokens.shape[1:]))
        first = 0
        for part in self._parts:
            here = ((index >= first) & (index < first + part.count)).nonzero()[:, 0]
            taken[here] = part.rows(index[here] - first)
            first += part.count
        return _decoded(taken, self.codebook)

    def _stretch(self, start: int, stop: int) -> Tensor:
        rows = self._rows()
        if not 0 <= start <= stop <= rows:
            raise IndexError(f"rows {start} to {stop} of a bank with {rows} rows")
        pieces, first = [self._parts[0].tokens[:0]], 0
        for part in self._parts:
            low, high = max(start - first, 0), min(stop - first, part.count)
            if low < high:
                pieces.append(part.rows(slice(low, high)))
            first += part.count
        return torch.cat(pieces)

    def _rows(self) -> int:
        if not self._parts:
            raise BankError("the memory bank is empty; adapt to some documents first")
        return sum(part.count for part in self._parts)

    def _part(self, sequence: int) -> Part:
        return next(part for part in self._parts if sequence in part.entries)

    def _placed(self, document_id: str) -> Placed:
        if document_id not in self._where:
            raise BankError(f"the bank holds no document {document_id!r}")
        sequence = self._where[document_id]
        return self._part(sequence).entries[sequence]


def _decoded(tokens: Tensor, codebook: Tensor | None) -> Tensor:
    """Memory tokens `[n, T, D]` of what the bank keeps of them."""
    return tokens if codebook is None else codebook[tokens.long()]
