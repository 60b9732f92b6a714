"""Documents of an index, by row. Rows are numbered in the order of addition; only compaction changes the numbers."""

from __future__ import annotations

import threading
from abc import abstractmethod
from array import array
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mac_rag.data.document_ids import HashedIds, id_hash
from mac_rag.data.provenance import content_hash
from mac_rag.data.types import Document
from mac_rag.errors import BankError
from mac_rag.retrieval.base import Hit, Retriever, check_documents

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
