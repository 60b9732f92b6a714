"""Engines of BM25: an incremental index, and the unchanged libraries bm25s and rank_bm25.

All compute the same scores from term ids. A scorer knows documents by row; rows ascend in the order of addition.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

K1, B = 1.5, 0.75  # saturation of the term frequency, weight of the length normalization
EPSILON = 0.25  # Okapi: the lower bound of an idf, as a fraction of the mean idf

Idf = Literal["lucene", "okapi"]
Terms = NDArray[np.int32]  # the term ids of one document, repeated as they occur in it
ScoredRows = tuple[NDArray[np.int64], NDArray[np.float64]]  # ascending rows, and the score of each


class Scorer(Protocol):
    """Scores the documents that share a term with a question."""

    def add(self, first: int, documents: Sequence[Terms]) -> None:
        """Adds documents in consecutive rows from `first` on, behind all existing rows."""

    def remove(self, row: int, terms: Terms) -> None:
        """Removes the document in a row."""

    def score(self, terms: Sequence[int]) -> ScoredRows:
        """Rows that contain one of the terms, and their scores; a repeated term counts repeatedly."""


class Postings:
    """An inverted index whose changes cost only the terms of the changed documents.

    It keeps, for each term, the rows that contain it and the counts there. Statistics of the whole corpus (idf, mean
    length) are applied to each question, so nothing becomes stale and nothing must be rebuilt. The arithmetic follows
    rank_bm25 operation by operation, so scores equal its scores bit by bit, except for Okapi's lower bound, a mean over
    the vocabulary, where they are equal up to rounding.

    Args:
        idf: `lucene` or `okapi`; see `BM25Retriever`.
    """

    def __init__(self, idf: Idf) -> None:
        self._idf = idf
        self._rows: list[array[int]] = []  # by term id: the rows that contain it, ascending
        self._counts: list[array[int]] = []  # by term id: its count in each of these rows
        self._lengths = np.zeros(0)  # number of terms of each row, and spare rows
        self._size = self._documents = self._total = 0
        # Statistics of the whole corpus; None after a change.
        self._norms: NDArray[np.float64] | None = None
        self._floor: float | None = None

    def add(self, first: int, documents: Sequence[Terms]) -> None:
        lengths = np.array([len(terms) for terms in documents], dtype=np.int64)
        self._size = first + len(documents)
        if self._size > len(self._lengths):
            self._lengths = np.concatenate([self._lengths, np.zeros(max(self._size, 1024))])
        self._lengths[first : self._size] = lengths
        self._documents += len(documents)
        self._total += int(lengths.sum())
        self._norms = self._floor = None
        if not lengths.sum():
            return
        rows = np.repeat(np.arange(first, self._size), lengths)
        occurrences = np.concatenate(documents).astype(np.int64) << 32 | rows
        pairs, counts = np.unique(occurrences, return_counts=True)
        terms, rows = pairs >> 32, (pairs & 0xFFFFFFFF).astype(np.int32)
        counts = counts.astype(np.int32)
        for _ in range(int(terms[-1]) + 1 - len(self._rows)):
            self._rows.append(array("i"))
            self._counts.append(array("i"))
        starts = np.flatnonzero(np.r_[True, terms[1:] != terms[:-1]])
        for term, start, stop in zip(terms[starts].tolist(), starts.tolist(), [*starts[1:].tolist(), len(terms)]):
            self._rows[term].frombytes(rows[start:stop].tobytes())
            self._counts[term].frombytes(counts[start:stop].tobytes())

    def remove(self, row: int, terms: Terms) -> None:
        for term in np.unique(terms).tolist():
            at = int(np.searchsorted(np.frombuffer(self._rows[term], np.int32), row))
            del self._rows[term][at], self._counts[term][at]
        self._documents -= 1
        self._total -= len(terms)
        self._norms = self._floor = None

    def score(self, terms: Sequence[int]) -> ScoredRows:
        scores = np.zeros(self._size)
        is_hit = np.zeros(self._size, dtype=np.bool_)
        columns: dict[int, tuple[NDArray[np.int32], NDArray[np.float64]]] = {}
        for term in terms:
            if term not in columns:
                columns[term] = self._column(term)
                is_hit[columns[term][0]] = True
            rows, column = columns[term]
            scores[rows] += column
        hits = np.flatnonzero(is_hit)
        return hits, scores[hits]

    def _column(self, term: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The rows that contain a term, and its contribution to the score of each."""
        rows = np.frombuffer(self._rows[term], np.int32)
        if not len(rows):
            return rows, np.zeros(0)
        if self._norms is None:
            mean = self._total / self._documents
            self._norms = K1 * (1 - B + B * self._lengths[: self._size] / mean)
        counts = np.frombuffer(self._counts[term], np.int32)
        return rows, self._weight(len(rows)) * (counts * (K1 + 1) / (counts + self._norms[rows]))

    def _weight(self, holding: int) -> float:
        """The idf of a term that `holding` documents contain."""
        if self._idf == "lucene":
            return lucene(self._documents, holding)
        weight = _okapi(self._documents, holding)
        if weight >= 0:
            return weight
        if self._floor is None:
            sizes = Counter(len(rows) for rows in self._rows if rows)
            total = math.fsum(_okapi(self._documents, size) * terms for size, terms in sizes.items())
            self._floor = EPSILON * total / sizes.total()
        return self._floor


class LibraryScorer:
    """A library's index over all documents, rebuilt at the first question after a change.

    Args:
        build: indexes the term ids of all documents; returns a function from a question's term ids to scored rows.
    """

    def __init__(self, build: Callable[[list[list[int]]], Callable[[list[int]], ScoredRows]]) -> None:
        self._build = build
        self._terms: dict[int, Terms] = {}
        self._index: Callable[[list[int]], ScoredRows] | None = None
        self._live: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def add(self, first: int, documents: Sequence[Terms]) -> None:
        self._terms.update(enumerate(documents, first))
        self._index = None

    def remove(self, row: int, terms: Terms) -> None:
        del self._terms[row]
        self._index = None

    def score(self, terms: Sequence[int]) -> ScoredRows:
        if not any(map(len, self._terms.values())):  # neither library can index documents without any term
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        if self._index is None:
            self._index = self._build([document.tolist() for document in self._terms.values()])
            self._live = np.fromiter(self._terms, dtype=np.int64)
        hits, scores = self._index(list(terms))
        return self._live[hits], scores


def bm25s_index(documents: list[list[int]]) -> Callable[[list[int]], ScoredRows]:
    """The eager index of bm25s, a sparse matrix of all scores, with Lucene's idf."""
    import bm25s

    known = {term for document in documents for term in document}
    vocabulary = {term: index for index, term in enumerate(sorted(known))}
    ids = [[vocabulary[term] for term in document] for document in documents]
    index = bm25s.BM25(k1=K1, b=B, method="atire", idf_method="lucene", dtype="float64")
    index.index(
        (ids, {str(term): column for term, column in vocabulary.items()}), create_empty_token=False, show_progress=False
    )

    def score(terms: list[int]) -> ScoredRows:
        columns = [vocabulary[term] for term in terms if term in vocabulary]
        scores = index.get_scores(columns) if columns else np.zeros(len(documents))
        hits = np.flatnonzero(scores > 0)  # Lucene's idf is positive
        return hits, scores[hits]

    return score


def rank_bm25_index(idf: Idf) -> Callable[[list[list[int]]], Callable[[list[int]], ScoredRows]]:
    """The `BM25Okapi` of rank_bm25, the plain reference; a question costs time linear in the number of documents."""

    def build(documents: list[list[int]]) -> Callable[[list[int]], ScoredRows]:
        from rank_bm25 import BM25Okapi

        index: Any = BM25Okapi(documents, k1=K1, b=B, epsilon=EPSILON)
        if idf == "lucene":
            containing = Counter(term for document in documents for term in set(document))
            index.idf = {term: lucene(len(documents), holding) for term, holding in containing.items()}

        def score(terms: list[int]) -> ScoredRows:
            scores = index.get_scores(terms)
            if idf == "lucene":
                hits = np.flatnonzero(scores > 0)
            else:  # Okapi's score can be 0 or less for a document that shares a term
                hits = np.flatnonzero([not counts.keys().isdisjoint(terms) for counts in index.doc_freqs])
            return hits, scores[hits]

        return score

    return build


def lucene(documents: int, holding: int) -> float:
    """Lucene's idf of a term that `holding` of `documents` documents contain; always positive."""
    return math.log(1 + (documents - holding + 0.5) / (holding + 0.5))


def _okapi(documents: int, holding: int) -> float:
    """Okapi's idf without its lower bound; negative for a term in more than half of the documents."""
    return math.log(documents - holding + 0.5) - math.log(holding + 0.5)
