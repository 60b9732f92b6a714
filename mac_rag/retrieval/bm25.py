"""BM25: one class for two engines, an incremental index and the library rank_bm25.

Both compute scores from term ids. A scorer knows documents by row; rows ascend in the order of addition. Every
statistic of the corpus (number of documents, mean length, document frequencies) is computed over the allowed documents
alone, so a score equals, bit by bit, that in a corpus without the others.
"""

from __future__ import annotations

import math
import re
import unicodedata
from array import array
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from mac_rag.data.characters import normal_form
from mac_rag.data.types import Document
from mac_rag.errors import ConfigError
from mac_rag.retrieval import snapshot
from mac_rag.retrieval.base import Hit, RowRetriever, check_request
from mac_rag.untrusted_files import MalformedError

KIND = "bm25"
K1, B = 1.5, 0.75  # saturation of the term frequency, weight of the length normalization
# Lucene's stop words.
ENGLISH_STOPWORDS = tuple(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with".split()
)

# What makes words of a text, besides the tokenizer's settings: the normal form, Unicode's tables, the stemmer.
ANALYSIS = f"normal form 1, Unicode {unicodedata.unidata_version}, PyStemmer {version('PyStemmer')}"

Engine = Literal["incremental", "rank_bm25"]
Terms = NDArray[np.int32]  # the term ids of one document, repeated as they occur in it
Mask = NDArray[np.bool_]  # True for the rows of allowed documents, [rows]
ScoredRows = tuple[NDArray[np.int64], NDArray[np.float64]]  # ascending rows, and the score of each


@dataclass(frozen=True)
class Tokenizer:
    """Splits texts into terms: lower-cased words without stop words, stemmed.

    Args:
        pattern: regular expression that matches a word.
        stemmer: Snowball language of PyStemmer, such as `english`; None for no stemming.
        stopwords: lower-cased words that are dropped; empty to keep all words.

    Raises:
        ConfigError: for a language without a stemmer, an invalid pattern, or stop words that are not texts.

    Examples:
        >>> from mac_rag.retrieval import Tokenizer
        >>> Tokenizer()("The bridges were opened in May")
        ['bridg', 'were', 'open', 'may']
    """

    pattern: str = r"\w+"
    stemmer: str | None = "english"
    stopwords: tuple[str, ...] = ENGLISH_STOPWORDS
    _find: Callable[[str], list[str]] = field(init=False, repr=False, compare=False)
    _dropped: frozenset[str] = field(init=False, repr=False, compare=False, default=frozenset())
    _stem: Callable[[list[str]], list[str]] | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        try:
            compiled = re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(
                rf"the pattern {self.pattern!r} is not a regular expression: {error}; write one, such as \w+"
            ) from None
        if compiled.groups:
            raise ConfigError(f"the pattern {self.pattern!r} has groups; write them as (?:...)")
        object.__setattr__(self, "_find", compiled.findall)
        if self.stemmer is not None:
            import Stemmer

            if self.stemmer not in Stemmer.algorithms():
                known = ", ".join(Stemmer.algorithms())
                raise ConfigError(f"unknown stemmer {self.stemmer!r}; choose None or one of {known}")
            object.__setattr__(self, "_stem", Stemmer.Stemmer(self.stemmer).stemWords)
        words = self.stopwords
        if not isinstance(words, tuple | list) or not all(isinstance(word, str) for word in words):
            raise ConfigError(f"stopwords must be a tuple of words, got {words!r:.80}; give () to keep all words")
        object.__setattr__(self, "stopwords", tuple(words))
        dropped = [normal_form(word, accents=accents) for word in words for accents in (False, True)]
        object.__setattr__(self, "_dropped", frozenset(dropped))

    def __call__(self, text: str) -> list[str]:
        # English is stemmed without accents, so that they are folded first. Other stemmers know them.
        accents = self.stemmer not in (None, "english", "porter")
        words = [word for word in self._find(normal_form(text, accents=accents)) if word not in self._dropped]
        stems = self._stem(words) if self._stem else words
        return [normal_form(stem) for stem in stems] if accents else stems

    def describe(self) -> dict[str, Any]:
        """The arguments that make an equal tokenizer, as JSON."""
        return {"pattern": self.pattern, "stemmer": self.stemmer, "stopwords": list(self.stopwords)}


class BM25Retriever(RowRetriever):
    """Ranks documents by BM25 with k1 = 1.5 and b = 0.75.

    The score of a document is the sum of `idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * length / mean length))` over
    all terms of the question; a repeated term counts repeatedly. A document is a hit if it shares a term with the
    question. Documents with equal scores rank in the order in which they were added. With `allowed`, the corpus is the
    allowed documents alone, for idf and mean length, too. So hits and scores equal, bit by bit, those of a retriever
    that never held the others.

    Args:
        engine: `incremental` updates its index at the cost of the changed documents only. The idf of a term that `n` of
            `N` documents contain is Lucene's, `ln(1 + (N - n + 0.5) / (n + 0.5))`, which is always positive.
            `rank_bm25` is the library's `BM25Okapi`, for comparisons with the results of others: its idf is
            `ln((N - n + 0.5) / (n + 0.5))` or, if that is negative, a quarter of the mean idf. It indexes all documents
            again after a change, and all allowed ones at each call of `retrieve` with `allowed`.
        tokenizer: splits documents and questions into terms; None for an English tokenizer.

    Raises:
        ConfigError: for an unknown engine.

    Examples:
        >>> from mac_rag.data.types import Document
        >>> from mac_rag.retrieval import BM25Retriever
        >>> retriever = BM25Retriever()
        >>> documents = [Document("bridge", "Anna Berg opened the bridge."), Document("river", "A ferry on the river.")]
        >>> retriever.add(documents)
        >>> [hits] = retriever.retrieve(["Who opened the bridge?"], k=5)
        >>> [hit.document_id for hit in hits]
        ['bridge']
    """

    def __init__(self, engine: Engine = "incremental", *, tokenizer: Tokenizer | None = None) -> None:
        if engine not in get_args(Engine):
            raise ConfigError(f"unknown BM25 engine {engine!r}; choose one of {', '.join(get_args(Engine))}")
        self.engine: Engine = engine
        self.tokenizer = tokenizer or Tokenizer()
        super().__init__()
        self._vocabulary: dict[str, int] = {}
        self._terms: list[Terms] = []  # by row
        self._scorer = self._new_scorer()

    def retrieve(self, questions: Sequence[str], k: int, *, allowed: Container[str] | None = None) -> list[list[Hit]]:
        check_request(questions, k)
        with self._lock:
            terms = [self._known_terms(text) for text in questions]
            mask = None if allowed is None else self._rows.mask(allowed)
            return [self._rows.hits(rows, scores, k) for rows, scores in self._scorer.score(terms, mask)]

    def scores(
        self, questions: Sequence[str], document_ids: Sequence[str], *, allowed: Container[str] | None = None
    ) -> list[list[float]]:
        """The score of each document for each question; 0 if they share no term, or the document is not allowed.

        Args:
            questions: texts.
            document_ids: ids of documents of this retriever.
            allowed: ids of the documents of which the corpus consists; None for all.

        Raises:
            BankError: for an unknown id.
        """
        with self._lock:
            rows = [self._rows.row_of(document_id) for document_id in document_ids]
            terms = [self._known_terms(text) for text in questions]
            scored = []
            for hits, scores in self._scorer.score(terms, self._rows.mask(allowed)):
                of_row = np.zeros(self._rows.size)
                of_row[hits] = scores
                scored.append(of_row[rows].tolist())
            return scored

    def _known_terms(self, text: str) -> list[int]:
        return [self._vocabulary[word] for word in self.tokenizer(text) if word in self._vocabulary]

    def save(self, folder: Path) -> None:
        """Writes documents, terms and all settings to a folder, from which `load` reads them.

        Raises:
            BankError: if JSON cannot hold the metadata.
        """
        with self._change, self._lock:
            if self._rows.size > len(self):
                self._compact()
            body = {
                "engine": self.engine,
                "tokenizer": self.tokenizer.describe(),
                "analysis": ANALYSIS,
                "vocabulary": list(self._vocabulary),
                "documents": snapshot.describe(self._rows),
            }
            lengths = np.array([len(terms) for terms in self._terms], dtype=np.int64)
            terms = np.concatenate([np.zeros(0, dtype=np.int32), *self._terms])
            snapshot.write(folder, KIND, body, {"terms": terms, "lengths": lengths})

    @classmethod
    def load(cls, folder: Path) -> BM25Retriever:
        """Reads a retriever from a folder, with its engine and tokenizer.

        Raises:
            BankError: if the folder holds no retriever, or a damaged one.
        """
        body, arrays = snapshot.read(folder, KIND)
        with snapshot.damaged(folder):
            retriever = cls(body["engine"], tokenizer=Tokenizer(**body["tokenizer"]))
            documents = snapshot.documents(body["documents"])
            if body["analysis"] != ANALYSIS:  # others may make other words of the same text, so index again
                retriever.add(documents)
                return retriever
            retriever._vocabulary = {word: term for term, word in enumerate(body["vocabulary"])}
            if len(retriever._vocabulary) != len(body["vocabulary"]):
                raise MalformedError("a word of the vocabulary comes twice")
            terms = _checked_terms(arrays, len(documents), retriever._vocabulary)
        retriever._append_terms(documents, terms)
        return retriever

    def _new_scorer(self) -> Scorer:
        return Postings() if self.engine == "incremental" else RankBM25()

    def _ids(self, words: list[str]) -> Terms:
        vocabulary = self._vocabulary
        ids = (vocabulary.setdefault(word, len(vocabulary)) for word in words)
        return np.fromiter(ids, dtype=np.int32, count=len(words))

    def _index(self, documents: Sequence[Document]) -> list[list[str]]:
        return [self.tokenizer(document.text) for document in documents]

    def _append(self, documents: Sequence[Document], indexed: list[list[str]]) -> None:
        self._append_terms(documents, [self._ids(words) for words in indexed])

    def _append_terms(self, documents: Sequence[Document], terms: list[Terms]) -> None:
        self._scorer.add(self._rows.size, terms)
        self._rows.append(documents)
        self._terms.extend(terms)

    def _remove(self, document_id: str) -> None:
        row, _ = self._rows.remove(document_id)
        self._scorer.remove(row, self._terms[row])
        self._terms[row] = self._terms[row][:0]

    def _compact(self) -> None:
        """Removes the rows and the words of deleted documents."""
        terms = [self._terms[row] for row in self._rows.compact()]
        words = list(self._vocabulary)
        used, ids = np.unique(np.concatenate([np.zeros(0, dtype=np.int32), *terms]), return_inverse=True)
        self._vocabulary = {words[term]: index for index, term in enumerate(used)}
        ends = np.cumsum([len(document) for document in terms])
        self._terms = np.split(ids.astype(np.int32), ends[:-1]) if terms else []
        self._scorer = self._new_scorer()
        self._scorer.add(0, self._terms)


def _checked_terms(arrays: Mapping[str, NDArray[Any]], documents: int, vocabulary: Mapping[str, int]) -> list[Terms]:
    """The terms of each document.

    Raises:
        MalformedError: if they do not fit the number of documents, or are not in the vocabulary.
    """
    lengths = snapshot.array(arrays, "lengths", np.int64, (documents,))
    terms = snapshot.array(arrays, "terms", np.int32, (None,))
    if not all(isinstance(word, str) for word in vocabulary):
        raise MalformedError("a word of the vocabulary is not a text")
    if (lengths < 0).any() or (lengths > len(terms)).any() or int(lengths.sum()) != len(terms):
        raise MalformedError(f"the lengths of the documents do not add up to {len(terms):,} terms")
    if len(terms) and not 0 <= int(terms.min()) <= int(terms.max()) < len(vocabulary):
        raise MalformedError("a term is not in the vocabulary")
    ends = np.cumsum(lengths)
    return np.split(terms, ends[:-1]) if len(ends) else []


class Scorer(Protocol):
    """Scores the documents that share a term with a question."""

    def add(self, first: int, documents: Sequence[Terms]) -> None:
        """Adds documents in consecutive rows from `first` on, after all existing rows."""

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
    """Statistics of the allowed documents. `norms`: `[rows]`, the term of BM25's denominator that grows with length."""

    allowed: Mask | None
    documents: int
    norms: NDArray[np.float64]


class Postings:
    """An inverted index whose changes cost only the terms of the changed documents.

    It stores, for each term, the rows that contain it and its counts there. Statistics of the corpus (idf, mean length)
    are applied for each question, so nothing becomes stale and nothing must be rebuilt. With `allowed`, a question
    costs as much as without, plus a pass over the mask for each of its terms.
    """

    def __init__(self) -> None:
        self._rows: list[array[int]] = []  # by term id: the rows that contain the term, ascending
        self._counts: list[array[int]] = []  # by term id: its count in each of these rows
        self._lengths = np.zeros(0)  # number of terms of each row, then spare zeros
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

    def holding(self, term: int) -> int:
        """The number of documents that contain a term."""
        return len(self._rows[term]) if term < len(self._rows) else 0

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
            is_allowed = corpus.allowed[rows]
            rows, counts = rows[is_allowed], counts[is_allowed]
        if not len(rows):
            return rows, np.zeros(0)
        idf = math.log(1 + (corpus.documents - len(rows) + 0.5) / (len(rows) + 0.5))
        return rows, idf * (counts * (K1 + 1) / (counts + corpus.norms[rows]))


class RankBM25:
    """The `BM25Okapi` of rank_bm25; a question costs time linear in the number of documents.

    Its index is rebuilt at the first question after a change, and for every other set of allowed documents.
    """

    def __init__(self) -> None:
        self._terms: dict[int, Terms] = {}
        self._index: Any = None  # over all documents; None after a change

    def add(self, first: int, documents: Sequence[Terms]) -> None:
        self._terms.update(enumerate(documents, first))
        self._index = None

    def remove(self, row: int, terms: Terms) -> None:
        del self._terms[row]
        self._index = None

    def score(self, questions: Sequence[Sequence[int]], allowed: Mask | None) -> Iterator[ScoredRows]:
        if allowed is not None:
            documents = {row: terms for row, terms in self._terms.items() if allowed[row]}
            index = self._over(documents)
        else:
            documents = self._terms
            index = self._index = self._index or self._over(documents)
        rows = np.fromiter(documents, dtype=np.int64, count=len(documents))
        return (self._scored(terms, index, rows) for terms in questions)

    def _over(self, documents: Mapping[int, Terms]) -> Any:
        """The library's index of some documents; None if no document has a term, which the library cannot index."""
        from rank_bm25 import BM25Okapi

        if not any(map(len, documents.values())):
            return None
        return BM25Okapi([terms.tolist() for terms in documents.values()], k1=K1, b=B)

    def _scored(self, terms: Sequence[int], index: Any, rows: NDArray[np.int64]) -> ScoredRows:
        if index is None:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        # The score of a document that shares a term can be 0 or less.
        hits = np.flatnonzero([not counts.keys().isdisjoint(terms) for counts in index.doc_freqs])
        return rows[hits], index.get_scores(list(terms))[hits]
