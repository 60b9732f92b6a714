"""The memory bank M: memory tokens of every document, with the documents' ids and provenance.

A document has one row of memory tokens `[T, D]`, or several if it was longer than the amortization network reads at
once. Documents may be merged into one entry, which then stands for all of them. What is on disk, and how it gets
there, is the store's business (`mac_rag.memory.storage.store`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from mac_rag.data.provenance import Member
from mac_rag.data.types import Document
from mac_rag.errors import BankError, FingerprintError
from mac_rag.memory.contents import BankEntry, Contents
from mac_rag.memory.parts import PART_BITS, Part
from mac_rag.memory.quantizer import nearest_codes
from mac_rag.memory.records import Record
from mac_rag.memory.storage.manifest import Intent
from mac_rag.memory.storage.store import Store, exists

__all__ = ["BankEntry", "MemoryBank"]


class MemoryBank(Contents):
    """A growing set of documents as memory tokens, in the order in which they arrived.

    Made by the constructor it lives in memory. `create` and `open` give one on disk, of which there can be one for
    writing and any number for reading. Changes are visible to others, and survive this process, from `commit` on; what
    was not committed at `close` is forgotten. It is not safe to change a bank in one thread and use it in another; the
    engine sees to that.

    Args:
        fingerprint: of the model that writes and reads it (`MACModel.fingerprint`).
        codebook: `[C, D]`; every memory token is kept as the index of its nearest code, and read as that code.

    Attributes:
        folder: where it is on disk; None for one in memory.
        version: grows with every change.
    """

    folder: Path | None = None

    def __init__(self, fingerprint: str, *, codebook: Tensor | None = None) -> None:
        self.fingerprint = fingerprint
        super().__init__(None if codebook is None else codebook.detach().to("cpu", torch.float32).clone())
        self.version = 0
        self._next = 0
        self._store: Store | None = None
        self._tail = Part(torch.empty(0), ())  # what is not on disk
        self._changed()

    @classmethod
    def create(cls, folder: str | Path, fingerprint: str, *, codebook: Tensor | None = None) -> MemoryBank:
        """A new and empty bank on disk, open for writing.

        Raises:
            BankError: when the folder holds a bank already.
        """
        bank = cls(fingerprint, codebook=codebook)
        bank._follow(Store.create(Path(folder), fingerprint, bank.codebook))
        return bank

    @classmethod
    def open(cls, folder: str | Path, *, write: bool = False, fingerprint: str | None = None) -> MemoryBank:
        """A bank on disk as its last commit left it. Its memory tokens stay there until they are used.

        Args:
            folder: where it is.
            write: to change it. There is one writer at a time.
            fingerprint: of the model that is to use it; None to look at any bank.

        Raises:
            BankError: when there is none, it is damaged, or someone else writes to it.
            FingerprintError: when another model wrote it.
        """
        store = Store.open(Path(folder), write=write)
        bank = cls(store.manifest.fingerprint)
        bank._follow(store)
        try:
            bank.check_model(bank.fingerprint if fingerprint is None else fingerprint)
        except FingerprintError:
            bank.close()
            raise
        return bank

    @staticmethod
    def exists(folder: str | Path) -> bool:
        """Whether a folder holds a bank, be it one that lost its manifest."""
        return exists(Path(folder))

    def _follow(self, store: Store) -> None:
        """Takes over the state of the store."""
        self._store, self.folder, self.codebook = store, store.folder, store.codebook
        self._next = store.manifest.next_sequence
        self._where = {
            document_id: sequence
            for segment in store.segments
            for sequence, (record, _) in segment.entries.items()
            for document_id in record.document_ids
        }
        self._changed()

    @property
    def intent(self) -> Intent:
        """What the last commit said is about to be changed, here and in a retriever."""
        return Intent() if self._store is None else self._store.manifest.intent

    @property
    def writable(self) -> bool:
        """Whether it can be changed."""
        return self._store is None or self._store.writable

    def commit(self, intent: Intent | None = None) -> None:
        """Makes all changes last: from here on no crash undoes them. Does nothing for a bank in memory.

        Args:
            intent: what is about to be changed after this; an empty one when that is done, None where it still stands.

        Raises:
            BankError: when it is not open for writing, or the disk refuses; then the changes can be committed later.
        """
        self._commit(compact=False, intent=intent)

    def compact(self) -> None:
        """Commits, and writes every segment again that has deleted entries, so that no byte of them remains.

        Raises:
            BankError: as `commit`.
        """
        self._commit(compact=True, intent=None)

    def _commit(self, *, compact: bool, intent: Intent | None) -> None:
        self._check_writable()
        if self._store is not None:
            self._store.commit([*self._store.segments, self._tail], self._next, compact=compact, intent=intent)
            self._tail = Part(torch.empty(0), ())
            self._hold([*self._store.segments, self._tail])

    def refresh(self) -> bool:
        """Follows the writer: a bank open for reading goes on to the last commit.

        Returns:
            Whether there was a newer one.

        Raises:
            BankError: when the bank is damaged; it stays as it was.
        """
        if self._store is None or not self._store.refresh():
            return False
        self._follow(self._store)
        return True

    def save(self, folder: str | Path) -> None:
        """Writes a copy as a new bank on disk, without what was deleted.

        Raises:
            BankError: when the folder holds a bank already.
        """
        Store.create(Path(folder), self.fingerprint, self.codebook, self._parts, self._next).close()

    def close(self) -> None:
        """Ends writing and lets others write. What was read can still be used."""
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> MemoryBank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_writable(self) -> None:
        if self._store is not None and not self._store.writable:
            raise BankError(f"{self.folder} is not open for writing; open it with write=True")

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
        self._check_writable()
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
        gone = [gone for document_id in members if document_id in self for gone in self._tombstone(document_id)]
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
        self._check_writable()
        placed = {placed.record.sequence: placed for placed in map(self._placed, document_ids)}
        if not placed or not len(phi):
            raise BankError(f"{len(placed)} entries and {len(phi)} rows of memory tokens cannot become one entry")
        members = tuple(member for sequence in sorted(placed) for member in placed[sequence].record.members)
        tokens = self._encoded(phi)
        for sequence in placed:
            self._tombstone(placed[sequence].record.members[0].document_id)
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
        self._check_writable()
        gone = self._tombstone(document_id)
        self._changed()
        return gone

    def _encoded(self, phi: Tensor) -> Tensor:
        """Memory tokens as the bank keeps them: `[N, T, D]`, or the indices of their nearest codes `[N, T]`."""
        known, width = self.row_shape, None if self.codebook is None else self.codebook.shape[1]
        fits = phi.ndim == 3 and phi.shape[1:].numel() > 0
        if not fits or known not in (None, phi.shape[1:]) or width not in (None, phi.shape[2]):
            raise BankError(
                f"memory tokens of shape {list(phi.shape[1:])} do not fit this bank"
                + (f", whose rows have shape {list(known)}" if known else "")
            )
        phi = phi.detach().to("cpu", torch.float32)
        if self.codebook is None:
            return phi
        nearest, _ = nearest_codes(phi.flatten(0, 1), self.codebook)
        return nearest.to(torch.int32).view(phi.shape[:2])

    def _append(self, tokens: Tensor, entries: Sequence[tuple[int, tuple[Member, ...]]]) -> None:
        records = [Record(self._next + index, rows, members) for index, (rows, members) in enumerate(entries)]
        self._next += len(records)
        if self._tail.count:
            self._tail.append(tokens, records)
        else:
            self._tail = Part(tokens.clone(), records)
        self._where |= {document_id: record.sequence for record in records for document_id in record.document_ids}
        self._changed()

    def _tombstone(self, document_id: str) -> tuple[str, ...]:
        sequence = self._placed(document_id).record.sequence
        part = self._part(sequence)
        ids = part.entries[sequence].record.document_ids
        part.tombstone(sequence)
        for gone in ids:
            del self._where[gone]
        return ids

    def _changed(self) -> None:
        self.version += 1
        if self._tail.is_mostly_deleted:
            self._tail = self._tail.compacted()
        self._hold([*(() if self._store is None else self._store.segments), self._tail])

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
        """Fills an empty bank with the entries of another, each with its members and memory tokens `[rows, T, D]`.

        Raises:
            BankError: when it is not empty, or memory tokens do not fit it.
        """
        self._check_writable()
        if len(self):
            raise BankError(f"this bank holds {len(self)} documents already; restore entries into an empty one")
        for members, phi in entries:
            self._append(self._encoded(phi), [(len(phi), members)])
