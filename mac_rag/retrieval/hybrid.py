"""Reciprocal-rank fusion of several retrievers."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Container, Iterable, Sequence
from pathlib import Path

from mac_rag.data.types import Document
from mac_rag.errors import BankError, ConfigError
from mac_rag.retrieval.base import Hit, Retriever, check_documents, check_request

RANK_OFFSET = 60  # as in Cormack, Clarke and Büttcher, SIGIR 2009; it limits how much the first ranks stand out


class HybridRetriever(Retriever):
    """Fuses the rankings of several retrievers: a document's score is the sum of `weight / (60 + rank)`.

    Ranks start at 1; a retriever that does not find a document adds nothing to its score. Documents with equal scores
    are ordered by the first retriever that found them, then by rank. All retrievers hold all documents.

    Args:
        retrievers: at least one retriever.
        weights: a non-negative weight for each retriever; None for equal weights. A retriever of weight 0 is not
            queried.
        depth: number of documents to retrieve from each retriever; `k` if that is more.

    Raises:
        ConfigError: for no retriever, a wrong number of weights or invalid ones, or a depth below 1.

    Examples:
        >>> from mac_rag.data.types import Document
        >>> from mac_rag.retrieval import BM25Retriever, HybridRetriever
        >>> hybrid = HybridRetriever([BM25Retriever(), BM25Retriever("rank_bm25")], weights=[2, 1])
        >>> hybrid.add([Document("bridge", "Anna Berg opened the bridge."), Document("river", "A ferry on the river.")])
        >>> [hits] = hybrid.retrieve(["Who opened the bridge?"], k=5)
        >>> [(hit.document_id, round(hit.score, 3)) for hit in hits]  # rank 1 for both: (2 + 1) / 61
        [('bridge', 0.049)]
    """

    def __init__(
        self, retrievers: Sequence[Retriever], weights: Sequence[float] | None = None, *, depth: int = 100
    ) -> None:
        if not retrievers:
            raise ConfigError("a hybrid retriever got no retrievers; give it at least one")
        self.retrievers = tuple(retrievers)
        self.weights = tuple(weights) if weights is not None else (1.0,) * len(self.retrievers)
        fit = len(self.weights) == len(self.retrievers) and all(w >= 0 and math.isfinite(w) for w in self.weights)
        if not fit or not any(self.weights):
            raise ConfigError(
                f"weights {list(self.weights)} do not fit {len(self.retrievers)} retrievers; "
                "give each a number from 0 up, and one of them more than 0"
            )
        if depth < 1:
            raise ConfigError(f"depth must be at least 1, got {depth}")
        self.depth = depth
        self._lock = threading.RLock()  # held during a change; questions do not wait for it

    def add(self, documents: Sequence[Document]) -> None:
        with self._lock:
            for done, retriever in enumerate(self.retrievers):
                try:
                    retriever.add(documents)
                except BaseException:
                    for other in self.retrievers[:done]:
                        for document in documents:
                            other.delete(document.id)
                    raise

    def put(self, documents: Sequence[Document]) -> None:
        with self._lock:
            check_documents(documents)
            for retriever in self.retrievers:
                retriever.put(documents)

    def delete(self, document_id: str) -> None:
        with self._lock:
            holders = [retriever for retriever in self.retrievers if document_id in retriever]
            if not holders:
                raise BankError(f"no document {document_id!r} in this index of {len(self)} documents")
            for retriever in holders:
                retriever.delete(document_id)

    def retrieve(self, questions: Sequence[str], k: int, *, allowed: Container[str] | None = None) -> list[list[Hit]]:
        check_request(questions, k)
        rankings: list[list[list[Hit]]] = [
            retriever.retrieve(questions, max(k, self.depth), allowed=allowed) if weight else [[] for _ in questions]
            for retriever, weight in zip(self.retrievers, self.weights)
        ]
        return [fuse([ranking[i] for ranking in rankings], self.weights)[:k] for i in range(len(questions))]

    def __len__(self) -> int:
        return len(self.retrievers[0])

    def __contains__(self, document_id: object) -> bool:
        return any(document_id in retriever for retriever in self.retrievers)

    def held(self, document_ids: Iterable[str]) -> list[str]:
        names = list(document_ids)
        known = {name for retriever in self.retrievers for name in retriever.held(names)}
        return [name for name in names if name in known]

    def content_hashes(self, document_ids: Collection[str] | None = None) -> dict[str, str]:
        """See `Retriever.content_hashes`; only of documents that all retrievers hold with the same hash."""
        first, *others = (retriever.content_hashes(document_ids) for retriever in self.retrievers)
        return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}

    def documents(self, document_ids: Collection[str]) -> list[Document]:
        return self.retrievers[0].documents(document_ids)

    def save(self, folder: Path) -> None:
        """Writes the retrievers to the folders `0`, `1`, ... inside `folder`.

        Raises:
            ConfigError: if one of them does not keep its documents itself.
        """
        with self._lock:
            for index, retriever in enumerate(self.retrievers):
                retriever.save(folder / str(index))


def fuse(rankings: Sequence[Sequence[Hit]], weights: Sequence[float]) -> list[Hit]:
    """Fuses rankings of one question; see `HybridRetriever`.

    Args:
        rankings: hits of each retriever, best first.
        weights: the weight of each retriever.

    Returns:
        All hits with fused scores, best first.
    """
    scores: dict[str, float] = {}
    first: dict[str, Hit] = {}
    for ranking, weight in zip(rankings, weights, strict=True):
        for rank, hit in enumerate(ranking, 1):
            first.setdefault(hit.document_id, hit)
            scores[hit.document_id] = scores.get(hit.document_id, 0.0) + weight / (RANK_OFFSET + rank)
    fused = [Hit(name, hit.text, scores[name], hit.metadata) for name, hit in first.items()]
    return sorted(fused, key=lambda hit: -hit.score)
