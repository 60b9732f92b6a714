"""BM25: an incremental index, bm25s and rank_bm25 behind one class, with equal results."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from mac_rag.data.types import Document
from mac_rag.errors import ConfigError
from mac_rag.retrieval import snapshot
from mac_rag.retrieval.base import Hit, check_request
from mac_rag.retrieval.rows import RowRetriever
from mac_rag.retrieval.scorers import (
    Idf,
    LibraryScorer,
    Postings,
    Scorer,
    Terms,
    bm25s_index,
    rank_bm25_index,
)
from mac_rag.retrieval.tokenizer import Tokenizer
from mac_rag.untrusted_files import MalformedError

Engine = Literal["incremental", "bm25s", "rank_bm25"]
KIND = "bm25"


class BM25Retriever(RowRetriever):
    """Ranks documents by BM25 with k1 = 1.5 and b = 0.75.

    The score of a document is the sum of `idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * length / mean length))` over
    all terms of the question; a repeated term counts repeatedly. A document is a hit if it shares a term with the
    question. Documents with equal scores rank in the order in which they were added. With `allowed`, the allowed
    documents alone are the corpus: idf and mean length are theirs, and hits and scores equal, bit by bit, those of a
    retriever that never held the others.

    Args:
        engine: `incremental` updates its index at the cost of the changed documents only. `bm25s` and `rank_bm25` are
            the libraries, which index all documents again after a change, and the allowed ones again at each call of
            `retrieve` with `allowed`. Scores are the same.
        tokenizer: splits documents and questions into terms; None for an English tokenizer.
        idf: the idf of a term that `n` of `N` documents contain. `lucene` is `ln(1 + (N - n + 0.5) / (n + 0.5))`, which
            is always positive, even for very few documents. `okapi` is `ln((N - n + 0.5) / (n + 0.5))` or, if that is
            negative, a quarter of the mean idf, as in rank_bm25's `BM25Okapi`.

    Raises:
        ConfigError: for an unknown engine or idf, or an idf that the engine does not support.

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

    def __init__(
        self, engine: Engine = "incremental", *, tokenizer: Tokenizer | None = None, idf: Idf = "lucene"
    ) -> None:
        if engine not in get_args(Engine):
            raise ConfigError(f"unknown BM25 engine {engine!r}; choose one of {', '.join(get_args(Engine))}")
        if idf not in get_args(Idf):
            raise ConfigError(f"unknown idf {idf!r}; choose one of {', '.join(get_args(Idf))}")
        if engine == "bm25s" and idf == "okapi":
            raise ConfigError("bm25s has no idf with Okapi's floor; choose engine incremental or rank_bm25, or lucene")
        self.engine: Engine = engine
        self.idf: Idf = idf
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

    def scores(self, questions: Sequence[str], document_ids: Sequence[str]) -> list[list[float]]:
        """The score of each document for each question, over the whole corpus; 0 for one that shares no term with it.

        Raises:
            BankError: for an unknown id.
        """
        with self._lock:
            rows = [self._rows.row_of(document_id) for document_id in document_ids]
            terms = [self._known_terms(text) for text in questions]
            scored = []
            for hits, scores in self._scorer.score(terms, self._rows.mask(None)):
                of_row = np.zeros(self._rows.size)
                of_row[hits] = scores
                scored.append(of_row[rows].tolist())
            return scored

    def _known_terms(self, text: str) -> list[int]:
        return [self._vocabulary[word] for word in self.tokenizer(text) if word in self._vocabulary]

    def save(self, folder: Path) -> None:
        """Writes documents, terms and all settings to a folder, from which `load` reads them.

        Raises:
            BankError: when metadata cannot be written as JSON.
        """
        with self._change, self._lock:
            if self._rows.size > len(self):
                self._compact()
            body = {
                "engine": self.engine,
                "idf": self.idf,
                "tokenizer": self.tokenizer.describe(),
                "versions": _versions(),
                "vocabulary": list(self._vocabulary),
                "documents": snapshot.describe(self._rows),
            }
            lengths = np.array([len(terms) for terms in self._terms], dtype=np.int64)
            terms = np.concatenate([np.zeros(0, dtype=np.int32), *self._terms])
            snapshot.write(folder, KIND, body, {"terms": terms, "lengths": lengths})

    @classmethod
    def load(cls, folder: Path) -> BM25Retriever:
        """Reads a retriever from a folder, with the engine, idf and tokenizer that it was saved with.

        Raises:
            BankError: when the folder holds no retriever, or it is damaged.
        """
        body, arrays = snapshot.read(folder, KIND)
        with snapshot.damaged(folder):
            retriever = cls(body["engine"], tokenizer=Tokenizer(**body["tokenizer"]), idf=body["idf"])
            documents = snapshot.documents(body["documents"])
            if body["versions"] != _versions():  # another stemmer can stem differently, so index again
                retriever.add(documents)
                return retriever
            retriever._vocabulary = {word: term for term, word in enumerate(body["vocabulary"])}
            if len(retriever._vocabulary) != len(body["vocabulary"]):
                raise MalformedError("a word of the vocabulary comes twice")
            terms = _checked_terms(arrays, len(documents), retriever._vocabulary)
        retriever._append_terms(documents, terms)
        return retriever

    def _new_scorer(self) -> Scorer:
        if self.engine == "incremental":
            return Postings(self.idf)
        return LibraryScorer(bm25s_index if self.engine == "bm25s" else rank_bm25_index(self.idf))

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
        MalformedError: when they are not those of so many documents, or not in the vocabulary.
    """
    lengths = snapshot.array(arrays, "lengths", np.int64, (documents,))
    terms = snapshot.array(arrays, "terms", np.int32, (None,))
    if not all(isinstance(word, str) for word in vocabulary):
        raise MalformedError("a word of the vocabulary is no text")
    if (lengths < 0).any() or (lengths > len(terms)).any() or int(lengths.sum()) != len(terms):
        raise MalformedError(f"the documents have not {len(terms):,} terms together")
    if len(terms) and not 0 <= int(terms.min()) <= int(terms.max()) < len(vocabulary):
        raise MalformedError("a term is not in the vocabulary")
    ends = np.cumsum(lengths)
    return np.split(terms, ends[:-1]) if len(ends) else []


def _versions() -> dict[str, str]:
    """Versions of the packages that decide how a text is split into terms."""
    return {package: version(package) for package in ("PyStemmer", "bm25s")}
