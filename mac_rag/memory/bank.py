"""The memory bank M: memory tokens of every document, with the documents' ids and provenance.

A document has one row of memory tokens `[T, D]`, or several rows if it is longer than what the amortization network
reads at once. Several documents can be merged into one entry, which then stands for all of them.
`mac_rag.memory.storage.store` reads and writes banks on disk.
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
    """A growing set of documents as memory tokens, in the order of arrival.

    The constructor makes a bank in memory; `create` and `open` give a bank on disk. One process can write to a bank on
    disk while any number read it. `commit` makes changes visible to readers and crash-safe; `close` drops changes that
    were not committed. A bank is not thread-safe: `MACEngine` serializes access to it.

    Args:
        fingerprint: `MACModel.fingerprint` of the model that writes and reads the bank.
        codebook: `[C, D]`; each memory token is stored as the index of its nearest code and read as that code. None
            to store memory tokens as they are.

    Attributes:
        fingerprint: fingerprint of the model that wrote the bank.
        codebook: `[C, D]` in float32, or None.
        folder: folder of a bank on disk; None for a bank in memory.
        version: a number that grows with every change.

    Examples:
        >>> import torch
        >>> from mac_rag.data.types import Document
        >>> from mac_rag.memory import MemoryBank
        >>> bank = MemoryBank("fingerprint of the model")
        >>> documents = [Document("bridge", "The bridge opened."), Document("museum", "The museum closed.")]
        >>> bank.put(documents, torch.zeros(2, 4, 8))
        ()
        >>> len(bank), "bridge" in bank, bank["museum"].phi.shape
        (2, True, torch.Size([1, 4, 8]))
        >>> bank.delete("bridge")
        ('bridge',)
        >>> bank.document_ids
        ['museum']
    """

    folder: Path | None = None

    def __init__(self, fingerprint: str, *, codebook: Tensor | None = None) -> None:
        self.fingerprint = fingerprint
        super().__init__(None if codebook is None else codebook.detach().to("cpu", torch.float32).clone())
        self.version = 0
        self._next_sequence = 0
        self._store: Store | None = None
        self._uncreated: Path | None = None  # folder in which the first commit creates the bank
        self._tail = Part(torch.empty(0), ())  # entries that are not on disk yet
        self._changed()

    @classmethod
    def create(cls, folder: str | Path, fingerprint: str, *, codebook: Tensor | None = None) -> MemoryBank:
        """Makes a new, empty bank on disk and opens it for writing.

        Args:
            folder: folder of the bank; it is made if it does not exist.
            fingerprint: see the class.
            codebook: see the class.

        Raises:
            BankError: when the folder already holds a bank.
        """
        bank = cls(fingerprint, codebook=codebook)
        bank._follow(Store.create(Path(folder), fingerprint, bank.codebook))
        return bank

    @classmethod
    def create_on_commit(cls, folder: str | Path, fingerprint: str) -> MemoryBank:
        """An empty bank that is in memory until its first commit, which creates it on disk as `create` does.

        `commit` raises BankError when the folder holds a bank by then.
        """
        bank = cls(fingerprint)
        bank._uncreated = Path(folder)
        return bank

    @classmethod
    def open(cls, folder: str | Path, *, write: bool = False, fingerprint: str | None = None) -> MemoryBank:
        """Opens a bank on disk at its last commit. Memory tokens are memory-mapped and read when they are used.

        Args:
            folder: folder of the bank.
            write: True to change the bank. Only one process can write to it at a time.
            fingerprint: fingerprint of the model that will use the bank; None accepts a bank of any model.

        Raises:
            BankError: when there is no bank, it is damaged, or another process writes to it.
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
        """True if the folder holds a bank, even one that lost its manifest."""
        return exists(Path(folder))

    def _follow(self, store: Store) -> None:
        """Takes over the state of the store."""
        self._store, self.folder, self.codebook = store, store.folder, store.codebook
        self._next_sequence = store.manifest.next_sequence
        self._sequences = {
            document_id: sequence
            for segment in store.segments
            for sequence, (record, _) in segment.entries.items()
            for document_id in record.document_ids
        }
        self._changed()

    @property
    def intent(self) -> Intent:
        """The change of bank and retriever that the last commit announced; empty when none is under way."""
        return Intent() if self._store is None else self._store.manifest.intent

    @property
    def writable(self) -> bool:
        """True if the bank can be changed."""
        return self._store is None or self._store.writable

    def commit(self, intent: Intent | None = None) -> None:
        """Writes all changes to disk; no crash undoes them afterwards. Does nothing for a bank in memory.

        Args:
            intent: the change of bank and retriever that starts after this commit; an empty intent when that change is
                complete; None to leave the recorded intent as it is.

        Raises:
            BankError: when the bank is not open for writing, or the disk refuses the write. The changes are kept and
                can be committed later.
        """
        self._commit(compact=False, intent=intent)

    def compact(self) -> None:
        """Commits, and rewrites every segment that has deleted entries, so that no byte of them remains.

        Raises:
            BankError: see `commit`.
        """
        self._commit(compact=True, intent=None)

    def _commit(self, *, compact: bool, intent: Intent | None) -> None:
        self._check_writable()
        if self._uncreated is not None:
            self._store = Store.create(self._uncreated, self.fingerprint, self.codebook)
            self.folder, self._uncreated = self._store.folder, None
        if self._store is not None:
            self._store.commit([*self._store.segments, self._tail], self._next_sequence, compact=compact, intent=intent)
            self._tail = Part(torch.empty(0), ())
            self._hold([*self._store.segments, self._tail])

    def refresh(self) -> bool:
        """Moves a bank that is open for reading to the writer's last commit.

        Returns:
            True if there was a newer commit.

        Raises:
            BankError: when the bank on disk is damaged; this object then stays at its old commit.
        """
        if self._store is None or not self._store.refresh():
            return False
        self._follow(self._store)
        return True

    def save(self, folder: str | Path) -> None:
        """Writes a copy, without deleted entries, as a new bank on disk.

        Raises:
            BankError: when the folder already holds a bank.
        """
        Store.create(Path(folder), self.fingerprint, self.codebook, self._parts, self._next_sequence).close()

    def close(self) -> None:
        """Releases the right to write, so that another process can write. The bank can still be read."""
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
        """Adds documents and replaces those with the same ids. On an error the bank does not change.

        Args:
            documents: K documents with distinct ids.
            phi: `[N, T, D]`, the memory tokens of all documents, row after row.
            rows: the number of rows of each document, K numbers with the sum N; None for one row each.

        Returns:
            Ids of other documents that were removed, because they were merged with a replaced document.

        Raises:
            BankError: for an id that occurs twice, metadata that are not JSON, or memory tokens that do not fit the
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
        removed = [name for document_id in members if document_id in self for name in self._tombstone(document_id)]
        self._append(tokens, [(count, (member,)) for count, member in zip(counts, members.values())])
        return tuple(document_id for document_id in removed if document_id not in members)

    def merge(self, document_ids: Iterable[str], phi: Tensor) -> None:
        """Replaces the entries of these documents by one entry that stands for all of their documents.

        Args:
            document_ids: ids of documents, at least one of each entry to be merged.
            phi: `[rows, T, D]`, the memory tokens of the new entry.

        Raises:
            BankError: for an id that the bank does not hold, or memory tokens that do not fit the bank.
        """
        self._check_writable()
        records = {record.sequence: record for record in map(self._record, document_ids)}
        if not records or not 0 < len(phi) < 1 << PART_BITS:
            raise BankError(f"{len(records)} entries and {len(phi)} rows of memory tokens cannot become one entry")
        members = tuple(member for sequence in sorted(records) for member in records[sequence].members)
        tokens = self._encoded(phi)
        for record in records.values():
            self._tombstone(record.members[0].document_id)
        self._append(tokens, [(len(tokens), members)])

    def delete(self, document_id: str) -> tuple[str, ...]:
        """Deletes a document with all its rows.

        The share of one document cannot be taken out of merged memory tokens. So the whole entry is deleted, and the
        document has no influence afterwards.

        Returns:
            Ids of all deleted documents: this one, and those that it was merged with.

        Raises:
            BankError: for an id that the bank does not hold.
        """
        self._check_writable()
        deleted = self._tombstone(document_id)
        self._changed()
        return deleted

    def _encoded(self, phi: Tensor) -> Tensor:
        """Memory tokens as the bank stores them: `[N, T, D]`, or with a codebook the nearest codes `[N, T]`."""
        row_shape, width = self.row_shape, None if self.codebook is None else self.codebook.shape[1]
        fits = phi.ndim == 3 and phi.shape[1:].numel() > 0
        if not fits or row_shape not in (None, phi.shape[1:]) or width not in (None, phi.shape[2]):
            raise BankError(
                f"memory tokens of shape {list(phi.shape[1:])} do not fit this bank"
                + (f", whose rows have shape {list(row_shape)}" if row_shape else "")
            )
        phi = phi.detach().to("cpu", torch.float32)
        if not phi.isfinite().all():
            row = int((~phi.isfinite().flatten(1).all(1)).nonzero()[0])
            raise BankError(
                f"row {row:,} of {len(phi):,} rows of memory tokens has numbers that are not finite; look for them in "
                "the model's weights, or use dtype fp32 or bf16 in place of fp16"
            )
        if self.codebook is None:
            return phi
        nearest, _ = nearest_codes(phi.flatten(0, 1), self.codebook)
        return nearest.to(torch.int32).view(phi.shape[:2])

    def _append(self, tokens: Tensor, entries: Sequence[tuple[int, tuple[Member, ...]]]) -> None:
        records = [Record(self._next_sequence + index, *entry) for index, entry in enumerate(entries)]
        self._next_sequence += len(records)
        if self._tail.count:
            self._tail.append(tokens, records)
        else:
            self._tail = Part(tokens.clone(), records)
        self._sequences |= {document_id: record.sequence for record in records for document_id in record.document_ids}
        self._changed()

    def _tombstone(self, document_id: str) -> tuple[str, ...]:
        """Marks the entry of a document as deleted; returns the ids of all its documents."""
        record = self._record(document_id)
        self._part(record.sequence).tombstone(record.sequence)
        for member_id in record.document_ids:
            del self._sequences[member_id]
        return record.document_ids

    def _changed(self) -> None:
        self.version += 1
        if self._tail.is_mostly_deleted:
            self._tail = self._tail.compacted()
        self._hold([*(() if self._store is None else self._store.segments), self._tail])

    def check_model(self, fingerprint: str) -> None:
        """Refuses a model that did not write this bank.

        Raises:
            FingerprintError: when the fingerprints differ; names both.
        """
        if fingerprint != self.fingerprint:
            raise FingerprintError(
                f"this bank was written by model {self.fingerprint[:12]} and cannot be read by model "
                f"{fingerprint[:12]}; load the model that wrote it, or adapt the documents again into a new bank"
            )

    def restore(self, entries: Iterable[tuple[tuple[Member, ...], Tensor]]) -> None:
        """Fills an empty bank with entries of another bank.

        Args:
            entries: pairs of an entry's members and its memory tokens `[rows, T, D]`.

        Raises:
            BankError: when this bank is not empty, or memory tokens do not fit it.
        """
        self._check_writable()
        if len(self):
            raise BankError(f"this bank holds {len(self)} documents already; restore entries into an empty one")
        for members, phi in entries:
            self._append(self._encoded(phi), [(len(phi), members)])
