"""Training data of the question-answering pipelines: a data set, and retrieved documents for each question."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Literal, Self

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as array_bytes

from mac_rag.atomic_files import make_folder, sync_folder, write_file
from mac_rag.cli.terminal import say
from mac_rag.config import Config
from mac_rag.data import load_dataset
from mac_rag.data.characters import shown_id
from mac_rag.data.metrics import comparable, normalize
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document, QADataset, Question
from mac_rag.errors import ConfigError, DataError
from mac_rag.lm.fetched import cache_folder
from mac_rag.progress import progress_bar
from mac_rag.retrieval import BM25Retriever, DenseRetriever, HybridRetriever, Retriever
from mac_rag.retrieval.registry import check_name, make_retriever, needs_folder
from pipelines.corpora.continuations import read_continuations
from pipelines.corpora.multi_document import generate_multi_document

_BATCH = 256  # questions retrieved in one call
_MADE = ("multi-document", "continuations")  # data sets whose questions are made here
_DEPTH = 6  # fewest documents retrieved: runs with the paper's k of 1, 3 and 5 then share them

Rows = NDArray[np.int32]  # [questions, depth]: indices of documents, the best first; -1 for none


class DataConfig(Config):
    """Questions to train and validate on.

    Attributes:
        name: `newswire` (generated), `multi-document` (newswire whose questions need several documents), `squad`,
            `streamingqa`, `archivalqa`, `timeqa`, `own` for files of your own, or `continuations` for texts of your own
            without questions.
        path: folder of the data set's files; newswire has none. For `own` also a file, or `hub:OWNER/NAME`.
        columns: only for `own`: names of the columns that hold our fields, if they differ, such as `{question: q}`; see
            `mac_rag.data.own.FIELDS`.
        train: the split for training, or several of one data set, joined in this order.
        val: the split for validation.
        unlike: a split whose questions are left out of the training.
        documents: newswire documents to generate for training; most texts of `continuations`.
        validation_documents: number of documents in the validation stream.
        seed: random seed of the generated documents.
        update_rate: share of the newswire stories for training that a later document updates.
    """

    name: Literal[
        "newswire", "multi-document", "squad", "streamingqa", "archivalqa", "timeqa", "own", "continuations"
    ] = "newswire"
    path: str | None = None
    columns: dict[str, str] = Field(default_factory=dict)
    train: str | tuple[str, ...] = "train"
    val: str = "val"
    unlike: str | None = None
    documents: int = Field(50_000, ge=2)
    validation_documents: int = Field(256, ge=1)
    seed: int = 0
    update_rate: float = Field(0.04, ge=0, le=1)

    @model_validator(mode="after")
    def _has_files(self) -> Self:
        if self.name not in ("newswire", "multi-document") and self.path is None:
            raise ValueError(f"path is missing: give the place of the files of {self.name}, --set data.path=FOLDER")
        return self

    def training_set(self) -> QADataset:
        """The documents and questions to train on.

        Raises:
            ConfigError: see `load_dataset`.
            DataError: see `load_dataset`; for splits that share documents, and for a question that names no document.
        """
        if self.name == "newswire":
            return generate(
                "train", self.documents, seed=self.seed, questions_per_document=4, update_rate=self.update_rate
            )
        splits = (self.train,) if isinstance(self.train, str) else self.train
        most = self.documents if self.name in _MADE else None
        data = _usable(joined([self.load(split, documents=most) for split in splits]))
        if self.unlike is None:
            return data
        held_out = {comparable(q.question) for q in self.load(self.unlike, unanswered=True).questions}
        questions = tuple(question for question in data.questions if comparable(question.question) not in held_out)
        return dataclasses.replace(data, questions=questions)

    @field_validator("train")
    @classmethod
    def _named(cls, train: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not train:
            raise ValueError("train must name a split")
        return train

    def validation_set(self) -> QADataset:
        """The documents and questions to validate on; errors are those of `training_set`."""
        return _usable(self.load(self.val, documents=self.validation_documents))

    def load(self, split: str, *, documents: int | None = None, unanswered: bool = False) -> QADataset:
        """One split of the data set; see `load_dataset`."""
        if self.name == "multi-document":
            count = documents or self.documents
            return generate_multi_document(split, count, seed=self.seed, questions_per_kind=count)
        if self.name == "continuations":
            assert self.path is not None
            return read_continuations(self.path, split, documents=documents)
        return load_dataset(
            self.name, split, self.path, documents=documents, columns=self.columns, unanswered=unanswered
        )


class DataRecipe(Config):
    """Base of the recipes of tasks that read documents and questions."""

    data: DataConfig = DataConfig()


def _usable(data: QADataset) -> QADataset:
    """Shows the notes of a data set, and returns it.

    Raises:
        DataError: if a question names no document.
    """
    for note in data.notes:
        say(note, err=True)
    for question in data.questions:
        if question.document_id is None:
            raise DataError(
                f"question {shown_id(question.id)} names no document. Such questions can be evaluated; training has "
                "to know the document with the answer: give the questions a document_id, or rows with document"
            )
    return data


def joined(parts: Sequence[QADataset]) -> QADataset:
    """Joins several splits of a data set."""
    if len(parts) == 1:
        return parts[0]
    documents = [document for part in parts for document in part.documents]
    ids = Counter(document.id for document in documents)
    split = "+".join(part.split for part in parts)
    if len(ids) < len(documents):
        raise DataError(f"the splits {split} cannot be joined: both hold the document {ids.most_common(1)[0][0]!r}")
    questions = [question for part in parts for question in part.questions]
    notes = tuple(note for part in parts for note in part.notes)
    return QADataset(parts[0].name, split, tuple(documents), tuple(questions), notes)


class ContextConfig(Config):
    """Retrieved documents before the questions.

    Attributes:
        retriever: `none`, or the name of a retriever over the training documents (see `make_retriever`): `bm25`,
            `minilm`, `hybrid`, `contriever`, `dpr`, `sentence-transformers:MODEL`, `module:attr`.
        k: numbers of documents; one of them is drawn for each question.
        rate: share of the questions that get documents.
        gold_rate: share of these questions whose own document is among the k, shuffled, so that rank never tells the LM
            where the answer is. The others get no document in which an accepted answer occurs. None: the k documents as
            they are retrieved, the best first, as in the paper.
    """

    retriever: str = "none"
    k: tuple[int, ...] = (5,)
    rate: float = Field(1.0, ge=0, le=1)
    gold_rate: float | None = Field(1.0, ge=0, le=1)

    @field_validator("retriever")
    @classmethod
    def _known(cls, name: str) -> str:
        try:
            check_name(name)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if name.startswith("chroma:"):
            raise ValueError("training does not write to a Chroma store; minilm finds the same documents")
        return name

    @model_validator(mode="after")
    def _check(self) -> ContextConfig:
        if not self.k or min(self.k) < 1:
            raise ValueError(f"k must hold numbers of at least 1, got {list(self.k)}")
        return self


class Retrieved:
    """The best documents for each question of a data set.

    The cache folder holds the results under a sha256 of everything that they depend on: the retriever's settings and
    weights, the documents, the questions and `depth`. So later runs on the same data find them there, and an
    interrupted run finds the documents that it has encoded. Processes that need the same results wait for the first.
    The results of an imported retriever are not cached, since its dependencies are unknown.

    Args:
        name: name of the retriever; see `make_retriever`.
        data: documents to search, and questions to search for.
        depth: number of documents for each question.

    Raises:
        ConfigError: for an unknown retriever, or one that takes no documents.
        ModelLoadError: if an encoder cannot be loaded.
    """

    def __init__(self, name: str, data: QADataset, depth: int) -> None:
        self._name = name
        self._documents = data.documents
        self._depth = depth
        texts = list(dict.fromkeys(question.question for question in data.questions))
        self._rows = self._retrieved(texts)
        self._place = {text: place for place, text in enumerate(texts)}

    def __getitem__(self, question: str) -> list[Document]:
        """At most `depth` documents, the best first."""
        return [self._documents[row] for row in self._rows[self._place[question]].tolist() if row >= 0]

    def _retrieved(self, texts: Sequence[str]) -> Rows:
        """Reads the cached results, or retrieves and caches them."""
        retriever = self._retriever(None)
        if not needs_folder(self._name):
            return self._search(texts, retriever)
        folder = cache_folder() / "retrieved" / self._key(fingerprint(retriever), texts)
        make_folder(folder)
        file, encoded = folder / "rows.safetensors", folder / "encoded"
        with FileLock(folder / "lock"):
            rows = _read(file, (len(texts), self._depth))
            if rows is None:
                rows = self._search(texts, self._retriever(encoded))
                write_file(file, [array_bytes({"rows": rows})])
                sync_folder(folder)
                shutil.rmtree(encoded, ignore_errors=True)
        return rows

    def _retriever(self, folder: Path | None) -> Retriever:
        retriever = make_retriever(self._name, folder=folder, progress=True)
        assert retriever is not None
        return retriever

    def _search(self, texts: Sequence[str], retriever: Retriever) -> Rows:
        """The best documents for each text."""
        retriever.put(self._documents)
        place = {document.id: index for index, document in enumerate(self._documents)}
        # An imported retriever may hold other documents, too.
        allowed = None if len(retriever) == len(place) else place.keys()
        rows = np.full((len(texts), self._depth), -1, dtype=np.int32)
        with progress_bar("retrieve", len(texts)) as bar:
            for first in range(0, len(texts), _BATCH):
                batch = texts[first : first + _BATCH]
                for row, hits in enumerate(retriever.retrieve(batch, self._depth, allowed=allowed), first):
                    rows[row, : len(hits)] = [place[hit.document_id] for hit in hits]
                bar.advance(len(batch))
        return rows

    def _key(self, described: str, texts: Sequence[str]) -> str:
        digest = hashlib.sha256(json.dumps([described, self._depth, len(self._documents)]).encode())
        for text in (*(text for document in self._documents for text in (document.id, document.text)), *texts):
            digest.update(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
        return digest.hexdigest()


def fingerprint(retriever: Retriever) -> str:
    """A text that differs between retrievers that may rank differently."""
    if isinstance(retriever, DenseRetriever):
        return retriever.encoder.fingerprint
    if isinstance(retriever, HybridRetriever):
        return json.dumps([retriever.weights, retriever.depth, *map(fingerprint, retriever.retrievers)])
    assert isinstance(retriever, BM25Retriever)
    versions = [version(package) for package in ("mac-rag", "PyStemmer")]
    return json.dumps([retriever.engine, retriever.tokenizer.describe(), versions])


def _read(file: Path, shape: tuple[int, int]) -> Rows | None:
    """The rows of a file; None if it is missing or damaged."""
    try:
        rows: Rows = load_arrays(file.read_bytes())["rows"]
    except (OSError, SafetensorError, KeyError):
        return None
    return rows if rows.shape == shape else None


class ContextMiner:
    """Draws retrieved documents for training questions. They are retrieved once, at the start, for all questions.

    Raises:
        ConfigError: if there are not more documents than `k`; and as `Retrieved`.
    """

    def __init__(self, config: ContextConfig, data: QADataset) -> None:
        self._config = config
        self._documents = {document.id: document for document in data.documents}
        if max(config.k) >= len(self._documents):
            raise ConfigError(f"context.k is {max(config.k)}, but there are only {len(self._documents)} documents")
        self._retrieved = retrieved(config, data)

    def mine(self, questions: Sequence[Question], rng: random.Random) -> list[list[Document]]:
        """The documents before each question, at most the number that is drawn for it; empty for none."""
        if self._retrieved is None:
            return [[] for _ in questions]
        sizes = [rng.choice(self._config.k) if rng.random() < self._config.rate else 0 for _ in questions]
        mined = []
        for question, k in zip(questions, sizes, strict=True):
            if self._config.gold_rate is None:
                mined.append(self._retrieved[question.question][:k])
                continue
            gold = rng.random() < self._config.gold_rate
            best = self._retrieved[question.question] if k else []
            others = [document for document in best if document.id != question.document_id]
            if gold and k:
                chosen = [*others[: k - 1], self._documents[question.gold]]
            else:
                chosen = [document for document in others if not mentions(document.text, question.answers)][:k]
            rng.shuffle(chosen)
            mined.append(chosen)
        return mined


def mentions(text: str, answers: Sequence[str]) -> bool:
    """True if an accepted answer occurs in a text, without regard to case, punctuation and articles."""
    words = f" {normalize(text)} "
    return any(f" {normalize(answer)} " in words for answer in answers)


def retrieved(config: ContextConfig, data: QADataset) -> Retrieved | None:
    """The best documents for each question, one more than `k` in case its own is left out; None without a retriever."""
    if config.retriever == "none":
        return None
    return Retrieved(config.retriever, data, max(max(config.k) + 1, _DEPTH))
