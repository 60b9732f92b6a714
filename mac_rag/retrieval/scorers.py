"""Engines of BM25: an incremental index, and the unchanged libraries bm25s and rank_bm25.

All compute the same scores from term ids. A scorer knows documents by row; rows ascend in the order of addition. Every
statistic of the corpus (number of documents, mean length, document frequencies) is taken over the allowed documents
alone, so a score is, bit by bit, that of a corpus without the others.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

K1, B = 1.5, 0.75  # saturation of the term frequency, weight of the length normalization
EPSILON = 0.25  # Okapi: the lower bound of an idf, as a fraction of the mean idf

Idf = Literal["lucene", "okapi"]
Terms = NDArray[np.int32]  # the term ids of one document, repeated as they occur in it
Mask = NDArray[np.bool_]  # True for the rows of allowed documents, [rows]
ScoredRows = tuple[NDArray[np.int64], NDArray[np.float64]]  # ascending rows, and the score of each
Index = Callable[[Sequence[int]], ScoredRows]  # from the term ids of a question to what `Scorer.score` yields


class Scorer(Protocol):
    """Scores the documents that share a term with a question."""

    def add(self, first: int, documents: Sequence[Terms]) -> None:
        """Adds documents in consecutive rows from `first` on, behind all existing rows."""

    def remove(self, row: int, terms: Terms) -> None:
        """Removes the document in a row."""

    def score(self, questions: Sequence[Sequence[int]], allowed: Mask | None) -> Iterator[ScoredRows]:
        """For each question, the rows that contain one of its terms, and their scores.

        Args:
            questions: the term ids of each question; a repeated term counts repeatedly.
            allowed: the documents that make up the corpus; None for all.
        """


@dataclass
class _Corpus:
    """Statistics of the allowed documents.

    Attributes:
        allowed: which rows they are in; None for all.
        documents: how many there are.
        norms: `[rows]`, how far a row's length damps its counts.
        floor: Okapi's lower bound of an idf; None until it is needed.
    """

    allowed: Mask | None
    documents: int
    norms: NDArray[np.float64]
    floor: float | None = None


class Postings:
    """An inverted index whose changes cost only the terms of the changed documents.

    It keeps, for each term, the rows that contain it and the counts there. Statistics of the corpus (idf, mean length)
    are applied to each question, so nothing becomes stale and nothing must be rebuilt. With some documents allowed, a
    question costs what it costs over all, and a pass over the mask for each of its terms. The arithmetic follows
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
        self._all: _Corpus | None = None  # None after a change

    def add(self, first: int, documents: Sequence[Terms]) -> None:
        lengths = np.array([len(terms) for terms in documents], dtype=np.int64)
        self._size = first + len(documents)
        if self._size > len(self._lengths):
            self._lengths = np.concatenate([self._lengths, np.zeros(max(self._size, 1024))])
        self._lengths[first : self._size] = lengths
        self._documents += len(documents)
        self._total += int(lengths.sum())
        self._all = None
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
        self._all = None

    def score(self, questions: Sequence[Sequence[int]], allowed: Mask | None) -> Iterator[ScoredRows]:
        corpus = self._corpus(allowed)
        return (self._scored(terms, corpus) for terms in questions)

    def _corpus(self, allowed: Mask | None) -> _Corpus:
        if allowed is None and self._all is not None:
            return self._all
        lengths = self._lengths[: self._size]
        if allowed is None:
            documents, total = self._documents, self._total
        else:
            documents, total = int(allowed.sum()), int(lengths[allowed].sum())
        mean = total / documents if total else 1.0  # without any term, nothing is ever damped
        corpus = _Corpus(allowed, documents, K1 * (1 - B + B * lengths / mean))
        if allowed is None:
            self._all = corpus
        return corpus

    def _scored(self, terms: Sequence[int], corpus: _Corpus) -> ScoredRows:
        scores = np.zeros(self._size)
        is_hit = np.zeros(self._size, dtype=np.bool_)
        columns: dict[int, tuple[NDArray[np.int32], NDArray[np.float64]]] = {}
        for term in terms:
            if term not in columns:
                columns[term] = self._column(term, corpus)
                is_hit[columns[term][0]] = True
            rows, column = columns[term]
            scores[rows] += column
        hits = np.flatnonzero(is_hit)
        return hits, scores[hits]

    def _column(self, term: int, corpus: _Corpus) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The allowed rows that contain a term, and its contribution to the score of each."""
        if term >= len(self._rows):  # a word that no document has yet
            return np.zeros(0, np.int32), np.zeros(0)
        rows, counts = np.frombuffer(self._rows[term], np.int32), np.frombuffer(self._counts[term], np.int32)
        if corpus.allowed is not None:
            kept = corpus.allowed[rows]
            rows, counts = rows[kept], counts[kept]
        if not len(rows):
            return rows, np.zeros(0)
        return rows, self._weight(len(rows), corpus) * (counts * (K1 + 1) / (counts + corpus.norms[rows]))

    def _weight(self, holding: int, corpus: _Corpus) -> float:
        """The idf of a term that `holding` documents of the corpus contain."""
        if self._idf == "lucene":
            return lucene(corpus.documents, holding)
        weight = _okapi(corpus.documents, holding)
        if weight >= 0:
            return weight
        if corpus.floor is None:
            sizes = Counter(self._holding(corpus.allowed))
            total = math.fsum(_okapi(corpus.documents, size) * terms for size, terms in sizes.items())
            corpus.floor = EPSILON * total / sizes.total()
        return corpus.floor

    def _holding(self, allowed: Mask | None) -> Iterator[int]:
        """For each term of the corpus, how many of its documents contain the term."""
        if allowed is None:
            return (len(rows) for rows in self._rows if rows)
        counts = (int(allowed[np.frombuffer(rows, np.int32)].sum()) for rows in self._rows if rows)
        return (count for count in counts if count)


class LibraryScorer:
    """A library's index, rebuilt at the first question after a change and for every other set of allowed documents.

    Args:
        build: indexes the term ids of all documents; returns a function from a question's term ids to scored rows.
    """

    def __init__(self, build: Callable[[list[list[int]]], Index]) -> None:
        self._build = build
        self._terms: dict[int, Terms] = {}
        self._index: Index | None = None  # over all documents

    def add(self, first: int, documents: Sequence[Terms]) -> None:
        self._terms.update(enumerate(documents, first))
        self._index = None

    def remove(self, row: int, terms: Terms) -> None:
        del self._terms[row]
        self._index = None

    def score(self, questions: Sequence[Sequence[int]], allowed: Mask | None) -> Iterator[ScoredRows]:
        if allowed is not None:
            index = self._over({row: terms for row, terms in self._terms.items() if allowed[row]})
        else:
            index = self._index = self._index or self._over(self._terms)
        return map(index, questions)

    def _over(self, documents: Mapping[int, Terms]) -> Index:
        """An index over some documents, by row."""
        if not any(map(len, documents.values())):  # neither library can index documents without any term
            return lambda _: (np.zeros(0, dtype=np.int64), np.zeros(0))
        index = self._build([terms.tolist() for terms in documents.values()])
        numbers = np.fromiter(documents, dtype=np.int64)

        def score(terms: Sequence[int]) -> ScoredRows:
            hits, scores = index(terms)
            return numbers[hits], scores

        return score


def bm25s_index(documents: list[list[int]]) -> Index:
    """The eager index of bm25s, a sparse matrix of all scores, with Lucene's idf."""
    import bm25s

    known = {term for document in documents for term in document}
    vocabulary = {term: index for index, term in enumerate(sorted(known))}
    ids = [[vocabulary[term] for term in document] for document in documents]
    index = bm25s.BM25(k1=K1, b=B, method="atire", idf_method="lucene", dtype="float64")
    index.index(
        (ids, {str(term): column for term, column in vocabulary.items()}), create_empty_token=False, show_progress=False
    )

    def score(terms: Sequence[int]) -> ScoredRows:
        columns = [vocabulary[term] for term in terms if term in vocabulary]
        scores = index.get_scores(columns) if columns else np.zeros(len(documents))
        hits = np.flatnonzero(scores > 0)  # Lucene's idf is positive
        return hits, scores[hits]

    return score


def rank_bm25_index(idf: Idf) -> Callable[[list[list[int]]], Index]:
    """The `BM25Okapi` of rank_bm25, the plain reference; a question costs time linear in the number of documents."""

    def build(documents: list[list[int]]) -> Index:
        from rank_bm25 import BM25Okapi

        index: Any = BM25Okapi(documents, k1=K1, b=B, epsilon=EPSILON)
        if idf == "lucene":
            containing = Counter(term for document in documents for term in set(document))
            index.idf = {term: lucene(len(documents), holding) for term, holding in containing.items()}

        def score(terms: Sequence[int]) -> ScoredRows:
            scores = index.get_scores(list(terms))
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
