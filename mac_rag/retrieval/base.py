"""The interface of retrievers: they hold documents and find those that are relevant to a question."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mac_rag.data.characters import check_characters, shown_id
from mac_rag.data.provenance import check_document
from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError


@dataclass(frozen=True, slots=True)
class Hit:
    """One retrieved document.

    Examples:
        >>> from mac_rag.retrieval import BM25Retriever
        >>> retriever = BM25Retriever()
        >>> retriever.add([Document("bridge", "Anna Berg opened the bridge.", {"date": "2004-05-01"})])
        >>> [[hit]] = retriever.retrieve(["Who opened the bridge?"], k=1)
        >>> hit.document_id, hit.text, hit.metadata["date"]
        ('bridge', 'Anna Berg opened the bridge.', '2004-05-01')

    Attributes:
        document_id: id of the document.
        text: its text.
        score: its relevance; higher is better.
        metadata: its metadata.
    """

    document_id: str
    text: str
    score: float
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)


class Retriever(ABC):
    """Finds the documents that are relevant to a question. Thread-safe.

    Examples:
        >>> from mac_rag.retrieval import BM25Retriever
        >>> retriever: Retriever = BM25Retriever()  # or any other
        >>> retriever.add([Document("may", "The bridge opened."), Document("june", "The bridge closed.")])
        >>> retriever.put([Document("june", "The bridge is open again.")])  # replaces the document with this id
        >>> [hits] = retriever.retrieve(["When did the bridge open?"], k=5, allowed={"june"})
        >>> [hit.text for hit in hits]
        ['The bridge is open again.']
    """

    @abstractmethod
    def add(self, documents: Sequence[Document]) -> None:
        """Adds documents after the existing ones. On an error, the retriever does not change.

        Raises:
            BankError: for an id that exists already or occurs twice.
            BankError, DocumentError: for a document that cannot be kept exactly; see `check_documents`.
        """

    def put(self, documents: Sequence[Document]) -> None:
        """Adds documents and replaces those with the same ids.

        Raises:
            BankError: for an id that occurs twice.
            BankError, DocumentError: as `add`.
        """
        check_documents(documents)
        for document in documents:
            if document.id in self:
                self.delete(document.id)
        self.add(documents)

    @abstractmethod
    def delete(self, document_id: str) -> None:
        """Deletes a document.

        Raises:
            BankError: for an unknown id.
        """

    @abstractmethod
    def retrieve(self, questions: Sequence[str], k: int, *, allowed: Container[str] | None = None) -> list[list[Hit]]:
        """Returns at most `k` hits for each question, best first.

        Args:
            questions: B texts.
            k: number of hits per question.
            allowed: ids of the documents that may be found; None for all. Other documents are excluded before the best
                are chosen, so `k` hits are returned if there are enough allowed ones.

        Raises:
            ConfigError: if `k` is below 1.
            DocumentError: for a question with half of a surrogate pair or NUL.
        """

    @abstractmethod
    def __len__(self) -> int:
        """The number of documents."""

    @abstractmethod
    def __contains__(self, document_id: object) -> bool:
        """True if the retriever holds a document with this id."""

    def held(self, document_ids: Iterable[str]) -> list[str]:
        """Those of these ids that the retriever holds, in their order."""
        return [name for name in document_ids if name in self]

    def content_hashes(self, document_ids: Collection[str] | None = None) -> dict[str, str]:
        """The content hashes of documents by id (see `mac_rag.data.provenance.content_hash`).

        Args:
            document_ids: ids of documents; unknown ids are left out. None for all documents.

        Raises:
            ConfigError: for a retriever that cannot tell what it holds.
        """
        raise ConfigError(f"{type(self).__name__} does not tell which texts it holds; use a retriever that does")

    def documents(self, document_ids: Collection[str]) -> list[Document]:
        """The documents with these ids, in their order.

        Raises:
            BankError: for an unknown id.
            ConfigError: for a retriever that cannot tell what it holds.
        """
        raise ConfigError(f"{type(self).__name__} does not tell which texts it holds; use a retriever that does")

    def is_in(self, bank: object) -> bool:
        """True if the documents are in the file of this memory bank, and change with its next commit."""
        return False

    def save(self, folder: Path) -> None:
        """Writes the retriever to a folder, from which `make_retriever` reads it.

        A crash leaves the old state or the new one.

        Raises:
            ConfigError: for a retriever that does not keep its documents itself.
        """
        raise ConfigError(f"{type(self).__name__} keeps no documents itself; save the index that it reads")


def check_k(k: int) -> None:
    """Checks the number of hits.

    Raises:
        ConfigError: if `k` is below 1.
    """
    if k < 1:
        raise ConfigError(f"k must be at least 1, got {k}")


def check_request(questions: Sequence[str], k: int) -> None:
    """Checks the arguments of `retrieve`.

    Raises:
        ConfigError: if `k` is below 1.
        DocumentError: for a question with half of a surrogate pair or NUL.
    """
    check_k(k)
    for question in questions:
        check_characters(question)


def check_documents(documents: Sequence[Document]) -> None:
    """Checks that documents can be kept exactly, and that their ids are distinct.

    Raises:
        BankError, DocumentError: see `mac_rag.data.provenance.check_document`.
        BankError: if two documents have the same id; names it.
    """
    for document in documents:
        check_document(document)
    for document_id, count in Counter(document.id for document in documents).items():
        if count > 1:
            raise BankError(f"document id {shown_id(document_id)} comes {count} times; ids must be unique")
