"""The documents of an index by row: rows never change place between two compactions and stand in stream order."""

from __future__ import annotations

import threading
from collections.abc import Collection, Container, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mac_rag.data.provenance import content_hash
from mac_rag.data.types import Document
from mac_rag.errors import BankError
from mac_rag.retrieval.base import Hit, Retriever, check_distinct

_SPARE = 1024  # empty rows that are never worth a compaction


class Rows:
    """Documents in the order in which they were added, each in a row of its own; a deleted one leaves its row empty."""

    def __init__(self) -> None:
        self._row: dict[str, int] = {}
        self._documents: list[Document | None] = []
        self._live = bytearray()

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
        """Whether most rows are empty, so that it is time to compact."""
        return self.size > 2 * len(self) + _SPARE

    def check(self, documents: Sequence[Document]) -> None:
        """Refuses documents that cannot be added.

        Raises:
            BankError: for an id that is already there or comes twice.
        """
        for document in documents:
            if document.id in self._row:
                raise BankError(f"document {document.id!r} is already in the index; delete it before adding it again")
        check_distinct(documents)

    def append(self, documents: Iterable[Document]) -> None:
        """Takes in documents that were checked."""
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
        row = self._row.get(document_id)
        document = None if row is None else self._documents[row]
        if document is None:
            raise BankError(f"no document {document_id!r} in this index of {len(self)} documents")
        return document

    def content_hashes(self, document_ids: Collection[str] | None) -> dict[str, str]:
        """The content hash of each document, by id; of all for None."""
        if document_ids is None:
            return {document.id: content_hash(document) for document in self}
        return {name: content_hash(self.get(name)) for name in document_ids if name in self}

    def compact(self) -> NDArray[np.int64]:
        """Closes the gaps and returns the old rows in their new order."""
        kept = np.flatnonzero(self.live())
        self._documents = list(self)
        self._row = {document.id: row for row, document in enumerate(self)}
        self._live = bytearray(b"\1" * len(self._documents))
        return kept

    def live(self) -> NDArray[np.bool_]:
        """Which rows hold a document `[rows]`."""
        return np.frombuffer(bytes(self._live), dtype=np.bool_)

    def mask(self, allowed: Container[str] | None) -> NDArray[np.bool_] | None:
        """Which rows may be found `[rows]`; None for all."""
        if allowed is None:
            return None if len(self) == self.size else self.live()
        found = (document is not None and document.id in allowed for document in self._documents)
        return np.fromiter(found, dtype=np.bool_, count=self.size)

    def hits(self, rows: NDArray[np.int64], scores: NDArray[np.floating], k: int) -> list[Hit]:
        """The `k` best of some rows in ascending order, with a score for each; equal scores in stream order."""
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
    """A retriever that keeps its documents in memory, in rows; one thread at a time changes or reads them."""

    def __init__(self) -> None:
        self._rows = Rows()
        self._lock = threading.RLock()

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
