"""The interface of retrievers, which find documents that are relevant to a question; and documents kept in rows."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mac_rag.data.characters import check_characters, shown_id
from mac_rag.data.document_ids import HashedIds, id_hash
from mac_rag.data.provenance import check_document, content_hash
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


# Documents of an index, by row. Rows are numbered in the order of addition; only compaction changes the numbers.

_SPARE = 1024  # so many empty rows, or fewer, are not worth a compaction


class DocumentRows:
    """Documents in the order of addition, one in each row. A deleted document leaves its row empty."""

    def __init__(self) -> None:
        self._row: dict[str, int] = {}
        self._documents: list[Document | None] = []
        self._live = bytearray()
        self._hashes = array("q")  # id hashes of the first rows; `_id_hashes` adds the others

    def __len__(self) -> int:
        return len(self._row)

    def __contains__(self, document_id: object) -> bool:
        return document_id in self._row

    def __iter__(self) -> Iterator[Document]:
        return (document for document in self._documents if document is not None)

    @property
    def size(self) -> int:
        """The number of rows, empty ones included."""
        return len(self._documents)

    @property
    def sparse(self) -> bool:
        """True if most rows are empty, so that the index should be compacted."""
        return self.size > 2 * len(self) + _SPARE

    def check(self, documents: Sequence[Document]) -> None:
        """Checks that documents can be added.

        Raises:
            BankError: for an id that exists already or occurs twice.
        """
        for document in documents:
            if document.id in self._row:
                raise BankError(f"document {document.id!r} is already in the index; delete it before adding it again")
        check_documents(documents)

    def append(self, documents: Iterable[Document]) -> None:
        """Adds documents that passed `check`."""
        for document in documents:
            self._row[document.id] = len(self._documents)
            self._documents.append(document)
            self._live.append(1)

    def remove(self, document_id: str) -> tuple[int, Document]:
        """Empties a document's row; returns the row and the document.

        Raises:
            BankError: for an unknown id.
        """
        document = self.get(document_id)
        row = self._row.pop(document_id)
        self._documents[row] = None
        self._live[row] = 0
        return row, document

    def get(self, document_id: str) -> Document:
        """One document.

        Raises:
            BankError: for an unknown id.
        """
        document = self._documents[self.row_of(document_id)]
        assert document is not None
        return document

    def row_of(self, document_id: str) -> int:
        """The row of one document.

        Raises:
            BankError: for an unknown id.
        """
        if document_id not in self._row:
            raise BankError(f"no document {document_id!r} in this index of {len(self)} documents")
        return self._row[document_id]

    def content_hashes(self, document_ids: Collection[str] | None) -> dict[str, str]:
        """Content hashes by id; unknown ids are left out. None for all documents."""
        if document_ids is None:
            return {document.id: content_hash(document) for document in self}
        return {name: content_hash(self.get(name)) for name in document_ids if name in self}

    def compact(self) -> NDArray[np.int64]:
        """Removes empty rows; returns the old row numbers of the remaining rows, in order."""
        old_rows = np.flatnonzero(self.live())
        self._documents = list(self)
        self._row = {document.id: row for row, document in enumerate(self)}
        self._live = bytearray(b"\1" * len(self._documents))
        self._hashes = array("q")
        return old_rows

    def live(self) -> NDArray[np.bool_]:
        """`[rows]`, True for rows that hold a document."""
        return np.frombuffer(bytes(self._live), dtype=np.bool_)

    def mask(self, allowed: Container[str] | None) -> NDArray[np.bool_] | None:
        """`[rows]`, True for rows that may be found; None if all may be found."""
        if allowed is None:
            return None if len(self) == self.size else self.live()
        if isinstance(allowed, HashedIds):
            mask = self.live() & allowed.holds(self._id_hashes())
            if allowed.among is not None:
                for row in np.flatnonzero(mask):
                    document = self._documents[row]
                    mask[row] = document is not None and document.id in allowed.among
            return mask
        is_allowed = (document is not None and document.id in allowed for document in self._documents)
        return np.fromiter(is_allowed, dtype=np.bool_, count=self.size)

    def _id_hashes(self) -> NDArray[np.int64]:
        """`[rows]`, the `id_hash` of each row's document; a row that was emptied later keeps its hash."""
        new = self._documents[len(self._hashes) :]
        self._hashes.extend(0 if document is None else id_hash(document.id) for document in new)
        return np.frombuffer(self._hashes.tobytes(), dtype=np.int64)

    def hits(self, rows: NDArray[np.int64], scores: NDArray[np.floating], k: int) -> list[Hit]:
        """The `k` best of some rows, best first; equal scores in the order of rows.

        Args:
            rows: `[n]`, ascending row numbers.
            scores: `[n]`, the score of each row.
            k: most hits.
        """
        best = np.arange(len(scores))
        if len(best) > k:
            best = np.flatnonzero(scores >= np.partition(scores, -k)[-k])
        best = best[np.argsort(-scores[best], kind="stable")][:k]
        hits = []
        for index in best:
            document = self._documents[rows[index]]
            assert document is not None
            hits.append(Hit(document.id, document.text, float(scores[index]), document.metadata))
        return hits


class RowRetriever(Retriever):
    """A retriever that keeps its documents in memory, in rows.

    Threads that change it take turns. The long part of a change, such as encoding, comes before anything changes, and
    questions do not wait for it.
    """

    def __init__(self) -> None:
        self._rows = DocumentRows()
        self._change = threading.RLock()  # held during a change
        self._lock = threading.RLock()  # held while the fields are read or changed

    def add(self, documents: Sequence[Document]) -> None:
        with self._change:
            self._rows.check(documents)
            indexed = self._index(documents)
            with self._lock:
                self._append(documents, indexed)

    def put(self, documents: Sequence[Document]) -> None:
        with self._change:
            check_documents(documents)
            indexed = self._index(documents)
            with self._lock:
                for document in documents:
                    if document.id in self._rows:
                        self._remove(document.id)
                self._append(documents, indexed)
                self._tidy()

    def delete(self, document_id: str) -> None:
        with self._change, self._lock:
            self._remove(document_id)
            self._tidy()

    @abstractmethod
    def _index(self, documents: Sequence[Document]) -> Any:
        """Computes what the index stores of documents, for `_append`. Changes nothing."""

    @abstractmethod
    def _append(self, documents: Sequence[Document], indexed: Any) -> None:
        """Adds documents after the others."""

    @abstractmethod
    def _remove(self, document_id: str) -> None:
        """Empties a document's row; raises BankError for an unknown id."""

    @abstractmethod
    def _compact(self) -> None:
        """Removes empty rows."""

    def _tidy(self) -> None:
        if self._rows.sparse:
            self._compact()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, document_id: object) -> bool:
        return document_id in self._rows

    def content_hashes(self, document_ids: Collection[str] | None = None) -> dict[str, str]:
        with self._lock:
            return self._rows.content_hashes(document_ids)

    def documents(self, document_ids: Collection[str]) -> list[Document]:
        with self._lock:
            return [self._rows.get(document_id) for document_id in document_ids]
