"""What a retriever offers: it keeps documents in step with the memory bank and finds those that fit a question."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError


@dataclass(frozen=True, slots=True)
class Hit:
    """One retrieved document; a higher score fits the question better. `metadata` is the document's own."""

    document_id: str
    text: str
    score: float
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)


class Retriever(ABC):
    """Finds the documents that fit a question. Safe to call from several threads."""

    @abstractmethod
    def add(self, documents: Sequence[Document]) -> None:
        """Takes documents in, behind those already there; all of them or, on an error, none.

        Raises:
            BankError: for an id that is already there or comes twice.
        """

    def put(self, documents: Sequence[Document]) -> None:
        """Takes documents in, in place of those of the same ids.

        Raises:
            BankError: for an id that comes twice.
        """
        check_distinct(documents)
        for document in documents:
            if document.id in self:
                self.delete(document.id)
        self.add(documents)

    @abstractmethod
    def delete(self, document_id: str) -> None:
        """Forgets one document.

        Raises:
            BankError: for an unknown id.
        """

    @abstractmethod
    def retrieve(self, questions: Sequence[str], k: int, *, allowed: Container[str] | None = None) -> list[list[Hit]]:
        """Returns at most `k` hits for each question, the best first.

        Args:
            questions: texts.
            k: hits for each question.
            allowed: ids of the documents that may be found; None for all. Others are passed over before the best are
                chosen, so that `k` hits come back wherever enough allowed documents fit the question.

        Raises:
            ConfigError: when `k` is below 1.
        """

    @abstractmethod
    def __len__(self) -> int:
        """The number of documents."""

    @abstractmethod
    def __contains__(self, document_id: object) -> bool:
        """Whether a document of this id is there."""

    def content_hashes(self, document_ids: Collection[str] | None = None) -> dict[str, str]:
        """The `content_hash` of each document, by id, as the memory bank knows it.

        Args:
            document_ids: of these documents, as far as they are there; None for all.

        Raises:
            ConfigError: for a retriever that does not tell what it holds.
        """
        raise ConfigError(f"{type(self).__name__} does not tell which texts it holds")

    def documents(self, document_ids: Collection[str]) -> list[Document]:
        """The documents of these ids, in their order.

        Raises:
            BankError: for an unknown id.
            ConfigError: for a retriever that does not tell what it holds.
        """
        raise ConfigError(f"{type(self).__name__} does not tell which texts it holds")

    def save(self, folder: Path) -> None:
        """Writes the retriever to a folder, from which `make_retriever` reads it.

        A crash leaves the old state or the new.

        Raises:
            ConfigError: for a retriever that keeps its documents elsewhere.
        """
        raise ConfigError(f"{type(self).__name__} keeps no documents of its own to save; save what it is built on")


def check_k(k: int) -> None:
    """Refuses to look for less than one document.

    Raises:
        ConfigError: naming `k`.
    """
    if k < 1:
        raise ConfigError(f"k must be at least 1, got {k}")


def check_distinct(documents: Iterable[Document]) -> None:
    """Refuses documents of the same id.

    Raises:
        BankError: naming the id.
    """
    for document_id, count in Counter(document.id for document in documents).items():
        if count > 1:
            raise BankError(f"document id {document_id!r} comes {count} times; ids must be unique")
