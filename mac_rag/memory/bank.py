"""The memory bank M: memory tokens of every document, with the documents' ids and provenance.

A document has one row of memory tokens `[T, D]`, or several rows if it is longer than what the amortization network
reads at once. Several documents can be merged into one entry, which then stands for all of them.
`mac_rag.memory.storage.store` reads and writes banks on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from mac_rag.data.types import Document
from mac_rag.errors import BankError, FingerprintError
from mac_rag.memory.contents import Contents, Snapshot, Summarise
from mac_rag.memory.entries import BankEntry, NewEntry, described_members, new_entries
from mac_rag.memory.entry_table import Record, RecordList
from mac_rag.memory.parts import PART_BITS, Part, no_entries
from mac_rag.memory.rows import RowDtype, RowLayout, Rows
from mac_rag.memory.storage.folder import exists, local_folder
from mac_rag.memory.storage.manifest import Intent, Manifest
from mac_rag.memory.storage.segment import continues
from mac_rag.memory.storage.store import Store
from mac_rag.nn.product_quantizer import ProductQuantizer
from mac_rag.shipped_models import describe

__all__ = ["BankEntry", "MemoryBank", "Snapshot"]


class MemoryBank(Contents):
    """A growing set of documents as memory tokens, in the order of arrival.

    The constructor makes a bank in memory; `create` and `open` give a bank on disk. One process can write to a bank on
    disk while any number read it. `commit` makes changes visible to readers and crash-safe; `rollback` and `close` drop
    changes that were not committed. A bank is not thread-safe: `MACEngine` serializes access to it. Threads that only
    read can each have a `snapshot`.

    Args:
        fingerprint: `MACModel.fingerprint` of the model that writes and reads the bank.
        keep_texts: True to keep the documents' texts (`BankEntry.texts`), for a later model to adapt to.
        secure_delete: True to overwrite the bank's files with zeros before they are removed. Whoever opens the bank
            reads all of it into memory then, because memory-mapped files would become zeros as well.
        rows: numbers that memory tokens are kept in: `bf16`; `int8`, in half of the bytes; `pq`, in a seventh or less,
            as codes of the model's product quantizer; or `fp32`, which keeps them as they are. None for what an engine
            chooses, bf16, and for fp32 where something else fills the bank.

    Attributes:
        fingerprint: fingerprint of the model that wrote the bank.
        quantizer: with rows `pq`, the product quantizer that the first put documents came with; otherwise None.
        secure_delete: True if the bank's files are overwritten before they are removed.
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

    def __init__(
        self,
        fingerprint: str,
        *,
        keep_texts: bool = False,
        secure_delete: bool = False,
        rows: RowDtype | None = None,
    ) -> None:
        super().__init__(fingerprint)
        self.keep_texts = keep_texts
        self.secure_delete = secure_delete
        self.layout = RowLayout(dtype=rows)
        self._next_sequence = 0
        self._segments: list[Part] = []  # of the last commit, as copies that may have changed since
        self._tail = no_entries()  # entries that came since
        self._snapshot: Snapshot | None = None
        self._store: Store | None = None
        self._uncreated: Path | None = None  # folder in which the first commit creates the bank
        self._committed = self.snapshot()

    @classmethod
    def create(
        cls,
        folder: str | Path,
        fingerprint: str,
        *,
        keep_texts: bool = False,
        secure_delete: bool = False,
        rows: RowDtype | None = None,
    ) -> MemoryBank:
        """Makes a new, empty bank on disk and opens it for writing.

        Args:
            folder: folder of the bank; it is made if it does not exist.
            fingerprint, keep_texts, secure_delete, rows: see the class.

        Raises:
            BankError: when the folder already holds a bank.
        """
        bank = cls(fingerprint, keep_texts=keep_texts, secure_delete=secure_delete, rows=rows)
        bank._follow(bank._written(local_folder(folder), ()))
        return bank

    @classmethod
    def create_on_commit(
        cls,
        folder: str | Path,
        fingerprint: str,
        *,
        keep_texts: bool = False,
        secure_delete: bool = False,
        rows: RowDtype | None = None,
    ) -> MemoryBank:
        """An empty bank that is in memory until its first commit, which creates it on disk as `create` does.

        `commit` raises BankError when the folder holds a bank by then.
        """
        bank = cls(fingerprint, keep_texts=keep_texts, secure_delete=secure_delete, rows=rows)
        bank._uncreated = local_folder(folder)
        return bank

    @classmethod
    def open(cls, folder: str | Path, *, write: bool = False, fingerprint: str | None = None) -> MemoryBank:
        """Opens a bank at its last commit.

        Memory tokens are memory-mapped and read when they are used; those of a bank with `secure_delete` are read now.

        Args:
            folder: folder of the bank.
            write: True to change the bank. Only one process can write to it at a time.
            fingerprint: fingerprint of the model that will use the bank; None accepts a bank of any model.

        Raises:
            BankError: when there is no bank, it is damaged, another process writes to it, or for a URL.
            FingerprintError: when another model wrote it.
        """
        store = Store.open(local_folder(folder), write=write)
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
        """True if the folder holds a bank, even one that lost its manifest; a `BankError` where nobody can tell."""
        return exists(local_folder(folder))

    def _follow(self, store: Store) -> None:
        """Takes over the state of the store."""
        self._store, self.folder, self.quantizer = store, store.folder, store.quantizer
        self.keep_texts, self.secure_delete = store.manifest.keep_texts, store.manifest.secure_delete
        self.layout = store.manifest.layout
        self._next_sequence = store.manifest.next_sequence
        self._take_segments(store.segments)
        self.version += 1
        self._settle()

    @property
    def intent(self) -> Intent:
        """The change of bank and retriever that the last commit announced; empty when none is under way."""
        return Intent() if self._store is None else self._store.manifest.intent

    @property
    def writable(self) -> bool:
        """True if the bank can be changed."""
        return self._store is None or self._store.writable

    @property
    def committed(self) -> Snapshot:
        """The contents after the last commit; for a bank in memory that was never committed, none."""
        return self._committed

    def snapshot(self) -> Snapshot:
        """The current contents, uncommitted changes included, as they stay whatever happens to the bank."""
        if self._snapshot is None or self._snapshot.version != self.version:
            self._snapshot = Snapshot(self, [part.copy() for part in self._parts])
        return self._snapshot

    def keep_rows_as(self, layout: RowLayout, quantizer: ProductQuantizer | None = None) -> None:
        """Chooses how rows are kept, in a bank that holds none; any other bank stays as it is.

        A dtype that the bank has already been given stays.

        Args:
            layout: how rows are kept.
            quantizer: how they are kept in a bank with dtype pq, which keeps the first one that it is given.

        Raises:
            BankError: for dtype pq without a quantizer, or with one of another model.
        """
        self._check_writable()
        if len(self):
            return
        dtype = self.layout.dtype or layout.dtype
        if dtype != "pq":
            self.layout = layout.model_copy(update={"dtype": dtype, "whole_tokens": 0, "code_bytes": 0})
            return
        quantizer = self.quantizer or quantizer
        if quantizer is None:
            raise BankError(
                f"{describe(self.fingerprint)} has no codebooks to keep rows as 'pq'; fit them with python -m "
                "pipelines.fit_rows, or choose other numbers (rows 'int8')"
            )
        if quantizer.fingerprint != self.fingerprint:
            raise BankError(
                f"the codebooks for rows 'pq' were fitted to the memory tokens of {describe(quantizer.fingerprint)}, "
                f"not to those of {describe(self.fingerprint)}; fit them again with python -m pipelines.fit_rows"
            )
        self.quantizer, self.layout = quantizer, layout.quantized(quantizer)

    def put(
        self,
        documents: Sequence[Document],
        phi: Tensor,
        rows: Sequence[int] | None = None,
        *,
        summarise: Summarise | None = None,
    ) -> tuple[str, ...]:
        """Adds documents and replaces those with the same ids. On an error the bank does not change.

        Args:
            documents: K documents with distinct ids.
            phi: `[N, T, D]`, the memory tokens of all documents, row after row.
            rows: number of rows of each document; None for one row each.
            summarise: makes the summaries, in a bank whose layout has any; None if they are not known.

        Returns:
            Ids of other documents that were removed, because they were merged with a replaced document.

        Raises:
            BankError: for an id that occurs twice, metadata that are not JSON, or memory tokens that do not fit the
                documents or the bank.
        """
        self._check_writable()
        entries = new_entries(documents, rows, len(phi), keep_texts=self.keep_texts)
        encoded = self._encoded(phi, summarise)
        names = dict.fromkeys(document.id for document in documents)
        removed = [name for document_id in names if document_id in self for name in self._tombstone(document_id)]
        self._append(encoded, entries)
        return tuple(name for name in removed if name not in names)

    def describe(self, documents: Sequence[Document]) -> None:
        """Gives documents other metadata, such as another date. Their memory tokens and texts stay as they are.

        So does the time at which they were added, and with what they were merged.

        Args:
            documents: documents with distinct ids, with the texts that the bank holds them with.

        Raises:
            BankError: for an id that the bank does not hold or that occurs twice, for another text, and for metadata as
                `mac_rag.data.provenance.Member.of`; the bank does not change.
            DamageError: when the memory tokens of a document, or its kept text, are not what was written.
        """
        self._check_writable()
        members = described_members(documents, lambda name: self[name].members)
        found = {placed.record.sequence: (part, placed) for part, placed in map(self._found, members)}
        if not found:
            return
        rows, entries = [], []
        for part, placed in found.values():
            record = placed.record
            rows.append(part.entry_rows(placed))
            described = tuple(members.get(one.document_id, one) for one in record.members)
            entries.append(NewEntry(record.rows, described, part.texts(record)))
        for part, placed in found.values():
            part.tombstone(placed.record.sequence)
        self._append(Rows.cat(rows), entries)

    def merge(self, document_ids: Iterable[str], phi: Tensor) -> None:
        """Replaces the entries of these documents by one entry that stands for all of their documents.

        Args:
            document_ids: ids of documents, at least one of each entry to be merged.
            phi: `[rows, T, D]`, the memory tokens of the new entry.

        Raises:
            BankError: for an id that the bank does not hold, or memory tokens that do not fit the bank.
        """
        self._check_writable()
        found = {entry.sequence: entry for entry in map(self.__getitem__, document_ids)}
        merged = [found[sequence] for sequence in sorted(found)]
        if not merged or not 0 < len(phi) < 1 << PART_BITS:
            raise BankError(f"{len(merged)} entries and {len(phi)} rows of memory tokens cannot become one entry")
        members = tuple(member for entry in merged for member in entry.members)
        texts = tuple(text for entry in merged for text in entry.texts)
        encoded = self._encoded(phi)
        for entry in merged:
            self._tombstone(entry.document_id)
        self._append(encoded, [NewEntry(len(encoded), members, texts)])

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

    def restore(self, entries: Iterable[BankEntry]) -> None:
        """Appends entries of another bank.

        Args:
            entries: the entries. This bank must hold none of their documents.

        Raises:
            BankError: when this bank holds one of the documents, or memory tokens do not fit it. Entries that came
                before it are there, uncommitted.
        """
        self._check_writable()
        for entry in entries:
            for member in entry.members:
                if member.document_id in self:
                    raise BankError(f"this bank holds document {member.document_id!r} already; delete it first")
            rows = self._encoded(entry.phi)
            self._append(rows, [NewEntry(len(rows), entry.members, entry.texts)])

    def _append(self, rows: Rows, entries: Sequence[NewEntry]) -> None:
        records = [Record(self._next_sequence + n, entry.rows, entry.members) for n, entry in enumerate(entries)]
        texts = {record.sequence: entry.texts for record, entry in zip(records, entries) if self.keep_texts}
        self._next_sequence += len(records)
        if self._tail.count:
            self._tail.append(rows, records, texts)
        else:
            self._tail = Part(rows, RecordList(records), texts)
        self._changed()

    def _tombstone(self, document_id: str) -> tuple[str, ...]:
        """Marks the entry of a document as deleted; returns the ids of all its documents."""
        part, (record, _) = self._found(document_id)
        part.tombstone(record.sequence)
        return record.document_ids

    def _changed(self) -> None:
        self.version += 1
        if self._tail.is_mostly_deleted:
            self._tail = self._tail.compacted()
        self._hold([*self._segments, self._tail])

    def prepare(self) -> None:
        """Writes to disk what the next commit needs, so that little of it can fail. Nobody sees it before the commit.

        Raises:
            BankError: see `commit`.
        """
        self._check_writable()
        if self._store is not None:
            self._take_segments(self._store.write([*self._segments, self._tail], layout=self.layout))

    def commit(self, intent: Intent | None = None) -> None:
        """Writes all changes to disk; no crash undoes them afterwards. For a bank in memory, nothing is written.

        Args:
            intent: the change of bank and retriever that starts after this commit; an empty intent when that change is
                complete; None to leave the recorded intent as it is.

        Raises:
            BankError: when the bank is not open for writing, the disk refuses the write, or another process has changed
                the bank. The bank on disk is what it was. The changes are kept: commit them later, or `rollback`.
        """
        self._check_writable()
        self._commit(intent)

    def compact(self) -> None:
        """Commits, and rewrites every segment that has deleted entries, so that no byte of them remains.

        Each segment is rewritten in a commit of its own, the smallest first. So a disk that is nearly full needs room
        for one of them only.

        Raises:
            BankError: see `commit`; also when everything is committed, but a file that is not needed any more cannot be
                overwritten or removed. It goes with the next change of the bank, or with another `compact`.
        """
        self.commit()
        while outdated := [part for part in self._segments if part.tombstones]:
            self._commit(None, rewrite=min(outdated, key=lambda part: part.count))
        if self._store is not None and (error := self._store.tidy()) is not None:
            raise BankError(
                f"{self.folder} is rewritten, but an old file cannot be removed from it: {error}; compact it again"
            )

    def _commit(self, intent: Intent | None, *, rewrite: Part | None = None) -> None:
        if self._uncreated is not None:
            self._store = self._written(self._uncreated, [self._tail], intent)
            self.folder, self._uncreated = self._store.folder, None
        elif self._store is not None:
            parts = [*self._segments, self._tail]
            self._store.commit(
                parts,
                self._next_sequence,
                rewrite=rewrite,
                layout=self.layout,
                quantizer=self.quantizer,
                intent=intent,
            )
        if self._store is not None:
            self.quantizer = self._store.quantizer
            self._take_segments(self._store.segments)
        self._settle()

    def rollback(self) -> None:
        """Drops all changes since the last commit."""
        if self._store is not None and self._store.writable:
            self._store.tidy()
        if self._committed is self._snapshot and self._committed.version == self.version:
            return
        parts = [part.copy() for part in self._committed._parts]
        self._segments, self._tail = ([], parts[0]) if self._store is None and parts else (parts, no_entries())
        self.layout, self.quantizer = self._committed.layout, self._committed.quantizer
        self._changed()
        self._settle()

    def _take_segments(self, segments: Sequence[Part]) -> None:
        """Goes on with these segments, which hold all entries."""
        self._segments, self._tail = [segment.copy() for segment in segments], no_entries()
        self._hold([*self._segments, self._tail])

    def _settle(self) -> None:
        """Makes the current contents what `rollback` goes back to."""
        self._snapshot = None  # it holds the entries that are on disk now in memory
        self._committed = self.snapshot()

    def refresh(self) -> bool:
        """Moves a bank that is open for reading to the last commit, also to that of a backup that was put in its place.

        Returns:
            True if there was another commit.

        Raises:
            BankError: when the bank on disk is damaged; this object then stays at its old commit.
            FingerprintError: when a bank of another model has taken its place.
        """
        if self._store is None:
            return False
        segments, next_sequence = self._store.segments, self._next_sequence
        if not self._store.refresh():
            return False
        if not continues(segments, next_sequence, self._store.segments):
            self.history += 1
        self._follow(self._store)
        return True

    def save(self, folder: str | Path) -> None:
        """Writes a copy, without deleted entries, as a new bank on disk.

        Raises:
            BankError: when the folder already holds a bank.
        """
        self._written(local_folder(folder), self._parts, self.intent).close()

    def _written(self, folder: Path, parts: Sequence[Part], intent: Intent | None = None) -> Store:
        """A new bank on disk with these parts."""
        manifest = Manifest(
            fingerprint=self.fingerprint,
            next_sequence=self._next_sequence,
            keep_texts=self.keep_texts,
            secure_delete=self.secure_delete,
            layout=self.layout,
            intent=intent or Intent(),
        )
        return Store.create(folder, manifest, self.quantizer, parts)

    def close(self) -> None:
        """Releases the right to write, so that another process can write. The bank can still be read."""
        if self._store is not None:
            self._store.close()

    def __enter__(self) -> MemoryBank:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_writable(self) -> None:
        if self._store is not None and not self._store.writable:
            raise BankError(f"{self.folder} is not open for writing; open it with write=True")
