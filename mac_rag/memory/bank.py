"""The memory bank M: memory tokens of every document, with the documents' ids and provenance.

A document has one row of memory tokens `[T, D]`, or several rows if it is longer than what the amortization network
reads at once. Several documents can be merged into one entry, which then stands for all of them.
`mac_rag.memory.storage.store` reads and writes banks on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mac_rag.errors import BankError, FingerprintError
from mac_rag.memory.contents import Snapshot
from mac_rag.memory.editing import EditableContents
from mac_rag.memory.entries import BankEntry
from mac_rag.memory.parts import Part, no_entries
from mac_rag.memory.rows import RowDtype
from mac_rag.memory.storage.folder import exists, local_folder
from mac_rag.memory.storage.manifest import Intent, Manifest
from mac_rag.memory.storage.segment import continues
from mac_rag.memory.storage.store import Store

__all__ = ["BankEntry", "MemoryBank", "Snapshot"]


class MemoryBank(EditableContents):
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
        super().__init__(fingerprint, keep_texts, rows)
        self.secure_delete = secure_delete
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
