"""The memory bank M: memory tokens of every document, with the documents' ids and provenance.

A document has one row of memory tokens `[T, D]`, or several if it was longer than the amortization network reads at
once. Documents may be merged into one entry, which then stands for all of them. What is on disk, and how it gets
there, is the store's business (`mac_rag.memory.store`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mac_rag.data.types import Document
from mac_rag.errors import BankError, FingerprintError
from mac_rag.memory.parts import PART_BITS, Part, Placed
from mac_rag.memory.records import Member, Record, content_hash

if TYPE_CHECKING:
    from mac_rag.model import MACModel

__all__ = ["BankEntry", "Member", "MemoryBank", "content_hash"]

# Distances between memory tokens and codes that are in memory at once when tokens are quantised.
_DISTANCES = 1 << 24


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


class MemoryBank:
    """A growing set of documents as memory tokens, in the order in which they arrived.

    Made by the constructor it lives in memory. It is not safe to change in one thread and use in another; the engine
    sees to that.

    Args:
        fingerprint: of the model that writes and reads it (`MACModel.fingerprint`).
        codebook: `[C, D]`; every memory token is kept as the index of its nearest code, and read as that code.

    Attributes:
        version: grows with every change.
    """

    def __init__(self, fingerprint: str, *, codebook: Tensor | None = None) -> None:
        self.fingerprint = fingerprint
        self.codebook = None if codebook is None else codebook.detach().to("cpu", torch.float32).clone()
        self.version = 0
        self._next = 0
        self._where: dict[str, int] = {}
        self._tail = Part(torch.empty(0), ())
        self._changed()

    @classmethod
    def for_model(cls, model: MACModel) -> MemoryBank:
        """An empty bank for one model."""
        return cls(model.fingerprint)

    def put(self, documents: Sequence[Document], phi: Tensor, rows: Sequence[int] | None = None) -> tuple[str, ...]:
        """Adds documents, in place of those of the same ids; either all of them or, on an error, none.

        Args:
            documents: with ids that differ from each other.
            phi: memory tokens of all rows `[N, T, D]`.
            rows: how many rows each document has, in order; None for one each.

        Returns:
            Ids of other documents that had to go, because they were merged with a document that was replaced.

        Raises:
            BankError: for an id that occurs twice, metadata that are no JSON, or memory tokens that do not fit the
                documents or the bank.
        """
        counts = [1] * len(documents) if rows is None else list(rows)
        if len(counts) != len(documents) or sum(counts) != len(phi) or min(counts, default=1) < 1:
            raise BankError(f"{len(documents)} documents with {sum(counts)} rows, but {len(phi)} rows of memory tokens")
        if max(counts, default=1) >> PART_BITS:
            raise BankError(f"a document of {max(counts):,} rows is too long; split it below {1 << PART_BITS:,} rows")
        members: dict[str, Member] = {}
        for document in documents:
            if document.id in members:
                raise BankError(f"document id {document.id!r} occurs twice; ids must be unique")
            members[document.id] = Member.of(document)
        tokens = self._encoded(phi)
        gone = [gone for document_id in members if document_id in self for gone in self._bury(document_id)]
        self._append(tokens, [(count, (member,)) for count, member in zip(counts, members.values())])
        return tuple(document_id for document_id in gone if document_id not in members)

    def merge(self, document_ids: Iterable[str], phi: Tensor) -> None:
        """Puts one entry in place of those that hold these documents; it stands for all of their documents.

        Args:
            document_ids: at least one of each entry.
            phi: its memory tokens `[rows, T, D]`.

        Raises:
            BankError: for an id that the bank does not hold, or memory tokens that do not fit the bank.
        """
        placed = {placed.record.sequence: placed for placed in map(self._placed, document_ids)}
        if not placed or not len(phi):
            raise BankError(f"{len(placed)} entries and {len(phi)} rows of memory tokens cannot become one entry")
        members = tuple(member for sequence in sorted(placed) for member in placed[sequence].record.members)
        tokens = self._encoded(phi)
        for sequence in placed:
            self._bury(placed[sequence].record.members[0].document_id)
        self._append(tokens, [(len(tokens), members)])

    def delete(self, document_id: str) -> tuple[str, ...]:
        """Forgets a document, all its rows.

        Of memory tokens that were merged no one document's share can be taken out again. So the whole entry goes, and
        exactly no influence of the document remains.

        Returns:
            Ids of all documents that went: this one, and those that it was merged with.

        Raises:
            BankError: for an id that the bank does not hold.
        """
        gone = self._bury(document_id)
        self._changed()
        return gone

    def _encoded(self, phi: Tensor) -> Tensor:
        """Memory tokens as the bank keeps them: `[N, T, D]`, or the indices of their nearest codes `[N, T]`."""
        known = self.row_shape
        wanted = None if self.codebook is None else self.codebook.shape[1]
        if phi.ndim != 3 or (known or phi.shape[1:]) != phi.shape[1:] or (wanted or phi.shape[2]) != phi.shape[2]:
            raise BankError(
                f"memory tokens of shape {list(phi.shape[1:])} do not fit this bank"
                + (f", whose rows have shape {list(known)}" if known else "")
            )
        phi = phi.detach().to("cpu", torch.float32)
        return phi if self.codebook is None else _nearest(phi, self.codebook)

    def _append(self, tokens: Tensor, entries: Sequence[tuple[int, tuple[Member, ...]]]) -> None:
        records = [Record(self._next + index, rows, members) for index, (rows, members) in enumerate(entries)]
        self._next += len(records)
        if self._tail.count:
            self._tail.append(tokens, records)
        else:
            self._tail = Part(tokens.clone(), records)
        self._where |= {document_id: record.sequence for record in records for document_id in record.document_ids}
        self._changed()

    def _bury(self, document_id: str) -> tuple[str, ...]:
        sequence = self._placed(document_id).record.sequence
        part = self._part(sequence)
        ids = part.entries[sequence].record.document_ids
        part.bury(sequence)
        for gone in ids:
            del self._where[gone]
        return ids

    def _changed(self) -> None:
        self.version += 1
        if self._tail.is_mostly_buried:
            self._tail = self._tail.without_buried()
        self._parts = [part for part in (self._tail,) if part.count]
        self._row_keys: Tensor | None = None
        self._row_members: list[tuple[str, ...]] | None = None

    def _part(self, sequence: int) -> Part:
        return next(part for part in self._parts if sequence in part.entries)

    def _placed(self, document_id: str) -> Placed:
        if document_id not in self._where:
            raise BankError(f"the bank holds no document {document_id!r}")
        sequence = self._where[document_id]
        return self._part(sequence).entries[sequence]

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

    def check_model(self, fingerprint: str) -> None:
        """Refuses a model that did not write this bank.

        Raises:
            FingerprintError: naming both.
        """
        if fingerprint != self.fingerprint:
            raise FingerprintError(
                f"this bank was written by model {self.fingerprint[:12]} and cannot be read by model "
                f"{fingerprint[:12]}; load the model that wrote it, or adapt the documents again into a new bank"
            )

    def restore(self, entries: Iterable[tuple[tuple[Member, ...], Tensor]]) -> None:
        """Fills an empty bank with entries as they were, for the store."""
        for members, phi in entries:
            self._append(self._encoded(phi), [(len(phi), members)])

    def save(self, folder: str | Path) -> None:
        """Writes the bank to a folder; see `mac_rag.memory.store`."""
        from mac_rag.memory.store import save

        save(self, Path(folder))

    @classmethod
    def load(cls, folder: str | Path, fingerprint: str | None = None) -> MemoryBank:
        """Reads a bank from a folder.

        Args:
            folder: where it was saved.
            fingerprint: of the model that is to read it; None to look at any bank.

        Raises:
            BankError: when there is none, or it is damaged.
            FingerprintError: when another model wrote it.
        """
        from mac_rag.memory.store import load

        bank = load(Path(folder))
        if fingerprint is not None:
            bank.check_model(fingerprint)
        return bank


def _decoded(tokens: Tensor, codebook: Tensor | None) -> Tensor:
    """Memory tokens `[n, T, D]` of what the bank keeps of them."""
    return tokens if codebook is None else codebook[tokens.long()]


def _nearest(phi: Tensor, codebook: Tensor) -> Tensor:
    """The index of the code nearest to each memory token: `[N, T, D]` -> `[N, T]`."""
    offset = codebook.square().sum(1)
    step = max(1, _DISTANCES // len(codebook))
    nearest = [(offset - 2 * part @ codebook.T).argmin(1) for part in phi.flatten(0, 1).split(step)]
    return torch.cat(nearest).to(torch.int32).view(phi.shape[:2])
