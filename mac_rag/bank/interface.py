"""What an engine asks of a bank, wherever the bank lies; and a bank that one thread changes while others read it."""

from __future__ import annotations

import threading
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, Self

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from mac_rag.bank.directory import Directory
from mac_rag.bank.entries import Entry
from mac_rag.bank.rows import NewRows
from mac_rag.data.types import Document


class Intent(BaseModel):
    """A change that is about to be made to a retriever first and then to the bank.

    After a crash between the two it tells which documents may differ.

    Attributes:
        puts: ids of the documents to be added or replaced.
        deletes: ids of the documents to be deleted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    puts: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.puts or self.deletes)


class BankContents(Protocol):
    """The documents of a bank and their memory tokens; see `mac_rag.bank.bank.Contents`."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def path(self) -> Path | None: ...

    @property
    def version(self) -> int: ...

    @property
    def keep_texts(self) -> bool: ...

    @property
    def document_ids(self) -> list[str]: ...

    @property
    def row_members(self) -> list[tuple[str, ...]]: ...

    def ids_at(self, places: Sequence[int]) -> list[str]: ...

    @property
    def phi(self) -> Tensor: ...

    @property
    def supersedes(self) -> bool: ...

    @property
    def directory(self) -> Directory: ...

    def visible_rows(self, allowed: Container[str]) -> Tensor: ...

    def renewed(self, former: BankContents) -> BankContents: ...

    def release(self) -> None: ...

    def check_model(self, fingerprint: str) -> None: ...

    def __getitem__(self, document_id: str) -> Entry: ...

    def __iter__(self) -> Iterator[Entry]: ...

    def __len__(self) -> int: ...

    def __contains__(self, document_id: object) -> bool: ...


class Bank(BankContents, Protocol):
    """A bank that can be changed, or follows one that another process changes; see `mac_rag.bank.bank.MemoryBank`."""

    @property
    def writable(self) -> bool: ...

    @property
    def intent(self) -> Intent: ...

    @property
    def commits(self) -> int: ...

    @property
    def committed(self) -> BankContents: ...

    def snapshot(self) -> BankContents: ...

    def describe(self, documents: Sequence[Document]) -> None: ...

    def put(
        self, documents: Sequence[Document], phi: NewRows, rows: Sequence[int] | None = None
    ) -> tuple[str, ...]: ...

    def delete(self, document_id: str) -> tuple[str, ...]: ...

    def commit(self, intent: Intent | None = None) -> None: ...

    def rollback(self) -> None: ...

    def compact(self) -> None: ...

    def refresh(self) -> bool: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


class SharedBank:
    """A bank, and the right to change it, which one thread has at a time. Nobody waits to read.

    Examples:
        >>> from mac_rag import MemoryBank
        >>> shared = SharedBank(MemoryBank("fingerprint of the model"))
        >>> with shared.changing():
        ...     shared.bank.commit()  # whatever happens here, `latest` gives a commit
        >>> len(shared.latest())
        0

    Args:
        bank: the bank; the attribute may be replaced by another bank while nobody changes it.

    Attributes:
        changes: the number of changes that have begun or ended. It is odd while one is under way.
    """

    def __init__(self, bank: Bank) -> None:
        self.bank = bank
        self.changes = 0
        self._right = threading.RLock()
        self._look = threading.Lock()  # held for an instant

    def latest(self) -> BankContents:
        """The contents of the bank; while a thread changes it, those of its last commit."""
        with self._look:
            return self.bank.committed if self.changes % 2 else self.bank.snapshot()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """The right to change the bank; waits until no other thread has it."""
        with self._right:
            if self.changes % 2:  # by this very thread
                yield
                return
            self._count()
            try:
                yield
            finally:
                self._count()

    def _count(self) -> None:
        with self._look:
            self.changes += 1
