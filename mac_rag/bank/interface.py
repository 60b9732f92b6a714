"""What an engine asks of a bank, wherever the bank lies."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from mac_rag.bank.directory import Timeline
from mac_rag.bank.entries import Texts
from mac_rag.bank.rows import NewRows
from mac_rag.data.provenance import Member
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


class Entry(Protocol):
    """An entry of a bank; see `mac_rag.bank.entries.BankEntry`."""

    @property
    def members(self) -> tuple[Member, ...]: ...

    @property
    def document_id(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    @property
    def rows(self) -> int: ...

    @property
    def phi(self) -> Tensor: ...

    @property
    def texts(self) -> Texts: ...

    def place(self, document_id: str) -> int: ...


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

    @property
    def phi(self) -> Tensor: ...

    @property
    def supersedes(self) -> bool: ...

    @property
    def timeline(self) -> Timeline: ...

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
