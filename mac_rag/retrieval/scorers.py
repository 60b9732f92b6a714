"""Engines of BM25: an index that follows every change, and the libraries bm25s and rank_bm25 as they come.

All compute the same scores from term ids. A scorer knows documents by row; rows ascend in stream order.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

K1, B = 1.5, 0.75  # saturation of the term frequency, share of the length normalisation
EPSILON = 0.25  # Okapi: the floor of an idf, as a share of the mean idf

Idf = Literal["lucene", "okapi"]
Terms = NDArray[np.int32]  # the term ids of one document, repeated as they occur in it
Found = tuple[NDArray[np.int64], NDArray[np.float64]]  # rows in ascending order, and a score for each


class Scorer(Protocol):
    """Documents that share a term with a question, scored."""

    def add(self, first: int, documents: Sequence[Terms]) -> None:
        """Takes in documents whose rows start at `first`, beyond all rows so far."""

    def remove(self, row: int, terms: Terms) -> None:
        """Forgets one document."""

    def score(self, terms: Sequence[int]) -> Found:
        """Rows that hold one of the terms, with their scores; terms count as often as they come."""


class Postings:
    """An inverted index that costs a change only the terms of the documents changed.

    It keeps, for each term, the rows that hold it and how often; what depends on the whole corpus (idf, mean length)
    enters when a question is asked. So nothing is ever stale and nothing has to be rebuilt. The operations are
    rank_bm25's, one for one, so that scores equal its scores to the last bit (but for Okapi's floor, a mean over the
    vocabulary, where they equal to rounding).
    """

    def __init__(self, idf: Idf) -> None:
        self._idf = idf
        self._rows: list[array[int]] = []  # by term id, ascending
        self._counts: list[array[int]] = []
        self._lengths = np.zeros(0)  # terms of each row, with room to grow
        self._size = self._documents = self._total = 0
        # What depends on the corpus as a whole; None after a change.
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

    def score(self, terms: Sequence[int]) -> Found:
        scores = np.zeros(self._size)
        holds = np.zeros(self._size, dtype=np.bool_)
        columns: dict[int, tuple[NDArray[np.int32], NDArray[np.float64]]] = {}
        for term in terms:
            if term not in columns:
                columns[term] = self._column(term)
                holds[columns[term][0]] = True
            rows, column = columns[term]
            scores[rows] += column
        found = np.flatnonzero(holds)
        return found, scores[found]

    def _column(self, term: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The rows that hold a term, and what it adds to the score of each."""
        rows = np.frombuffer(self._rows[term], np.int32)
        if not len(rows):
            return rows, np.zeros(0)
        if self._norms is None:
            mean = self._total / self._documents
            self._norms = K1 * (1 - B + B * self._lengths[: self._size] / mean)
        counts = np.frombuffer(self._counts[term], np.int32)
        return rows, self._weight(len(rows)) * (counts * (K1 + 1) / (counts + self._norms[rows]))

    def _weight(self, holding: int) -> float:
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
    """A library's index over all documents, built anew at the first question after a change."""

    def __init__(self, build: Callable[[list[list[int]]], Callable[[list[int]], Found]]) -> None:
        self._build = build
        self._terms: dict[int, Terms] = {}
        self._index: Callable[[list[int]], Found] | None = None
        self._live: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def add(self, first: int, documents: Sequence[Terms]) -> None:
        self._terms.update(enumerate(documents, first))
        self._index = None

    def remove(self, row: int, terms: Terms) -> None:
        del self._terms[row]
        self._index = None

    def score(self, terms: Sequence[int]) -> Found:
        if not any(map(len, self._terms.values())):  # neither library can index documents that hold no term at all
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        if self._index is None:
            self._index = self._build([document.tolist() for document in self._terms.values()])
            self._live = np.fromiter(self._terms, dtype=np.int64)
        found, scores = self._index(list(terms))
        return self._live[found], scores


def bm25s_index(documents: list[list[int]]) -> Callable[[list[int]], Found]:
    """bm25s's eager index: a sparse matrix of all scores, with Lucene's idf."""
    import bm25s

    known = {term for document in documents for term in document}
    vocabulary = {term: index for index, term in enumerate(sorted(known))}
    ids = [[vocabulary[term] for term in document] for document in documents]
    index = bm25s.BM25(k1=K1, b=B, method="atire", idf_method="lucene", dtype="float64")
    index.index(
        (ids, {str(term): place for term, place in vocabulary.items()}), create_empty_token=False, show_progress=False
    )

    def score(terms: list[int]) -> Found:
        asked = [vocabulary[term] for term in terms if term in vocabulary]
        scores = index.get_scores(asked) if asked else np.zeros(len(documents))
        found = np.flatnonzero(scores > 0)  # Lucene's idf is positive
        return found, scores[found]

    return score


def rank_bm25_index(idf: Idf) -> Callable[[list[list[int]]], Callable[[list[int]], Found]]:
    """rank_bm25's `BM25Okapi`: the plain reference, linear in the number of documents."""

    def build(documents: list[list[int]]) -> Callable[[list[int]], Found]:
        from rank_bm25 import BM25Okapi

        index: Any = BM25Okapi(documents, k1=K1, b=B, epsilon=EPSILON)
        if idf == "lucene":
            containing = Counter(term for document in documents for term in set(document))
            index.idf = {term: lucene(len(documents), holding) for term, holding in containing.items()}

        def score(terms: list[int]) -> Found:
            scores = index.get_scores(terms)
            if idf == "lucene":
                found = np.flatnonzero(scores > 0)
            else:  # Okapi's may be 0 or less for a document that shares a term
                found = np.flatnonzero([not held.keys().isdisjoint(terms) for held in index.doc_freqs])
            return found, scores[found]

        return score

    return build


def lucene(documents: int, holding: int) -> float:
    """Lucene's idf: positive for every term."""
    return math.log(1 + (documents - holding + 0.5) / (holding + 0.5))


def _okapi(documents: int, holding: int) -> float:
    """Okapi's idf before its floor: negative for a term in more than half of the documents."""
    return math.log(documents - holding + 0.5) - math.log(holding + 0.5)
