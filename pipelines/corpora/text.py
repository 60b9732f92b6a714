"""Pretraining corpora: plain text in blocks, or documents followed by their questions and answers."""

from __future__ import annotations

import gzip
import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from pydantic import Field, model_validator

from mac_rag.config import Config, PromptFormat
from mac_rag.data.newswire.generate import generate
from mac_rag.data.types import Document, Question
from mac_rag.errors import DataError
from mac_rag.lm.prompt import PromptEncoder
from mac_rag.untrusted_files import (
    METADATA_DEPTH,
    ROW,
    ROW_CONTAINERS,
    MalformedError,
    lines_of,
    open_file,
    parse_json,
)
from pipelines.corpora.qa_data import DataConfig

_LARGEST_TEXT = 1 << 30  # bytes of a file that is one text
_TOKENIZER_TEXTS = 20_000  # texts that the tokenizer is learned from: a vocabulary of 2,048 changes little with more
SEED = 0  # of the generated documents, and of which paragraphs become cloze questions: a corpus is one corpus


class CorpusConfig(Config):
    """Texts to pretrain on.

    Attributes:
        files: glob of `.txt`, `.jsonl` or `.jsonl.gz` files; a jsonl row holds its text under `text`. None for
            newswire, generated documents with questions.
        cloze: share of the files' paragraphs that become cloze questions rather than plain text.
        questions: a data set whose documents and questions are read besides the files. Its validation split measures
            how well the LM answers.
        documents: number of newswire documents to generate.
        copy_steps: number of first steps on random tokens, repeated once. Only copying predicts them: within
            minutes they teach a small LM what answering from a document needs, which documents teach it far later.
        sequence_length: longest sequence in tokens.
        validation_documents: number of held-out newswire documents, or blocks at the end of the files.
    """

    files: str | None = None
    cloze: float = Field(0.0, ge=0, le=1)
    questions: DataConfig | None = None
    documents: int = Field(100_000, ge=1)
    copy_steps: int = Field(0, ge=0)
    sequence_length: int = Field(256, ge=16)
    validation_documents: int = Field(256, ge=1)

    @model_validator(mode="after")
    def _check(self) -> CorpusConfig:
        if self.files is None and (self.cloze or self.questions is not None):
            raise ValueError("cloze and questions are read beside text files; give the files, or leave both out")
        return self


def texts(config: CorpusConfig, prompt: PromptFormat) -> Iterator[str]:
    """The texts from which the tokenizer learns its vocabulary."""
    if config.files is None:
        count = min(config.documents, _TOKENIZER_TEXTS)
        data = generate("train", count, seed=SEED, questions_per_document=2)
        yield from (prompt.document.format(document=document.text) for document in data.documents)
        yield from (prompt.question.format(question=question.question) for question in data.questions)
        return
    paths = text_files(config.files)
    for path in paths:
        yield from islice(file_texts(path), -(-_TOKENIZER_TEXTS // len(paths)))


def text_files(pattern: str) -> list[Path]:
    """The files that match a glob, sorted by name.

    Raises:
        DataError: if no file matches.
    """
    paths = sorted(map(Path, glob(pattern)))
    if not paths:
        raise DataError(f"no file matches {pattern!r}")
    return paths


def file_texts(path: Path) -> Iterator[str]:
    """The texts of a file.

    Raises:
        DataError: see `file_rows`.
    """
    return (row["text"] for row in file_rows(path))


def file_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, each with a `text`; a file other than jsonl is one row.

    Raises:
        DataError: for a jsonl row without `text`, and for a file that is not UTF-8, cannot be read or is beyond
            the bounds of `mac_rag.untrusted_files`; names the file and the row.
    """
    try:
        with open_file(path, follow=True) as raw, _unpacked(path, raw) as file:
            if ".jsonl" not in path.name:
                content = file.read(_LARGEST_TEXT + 1)
                if len(content) > _LARGEST_TEXT:
                    raise MalformedError(f"it has more than {_LARGEST_TEXT:,} bytes; divide it")
                yield {"text": content.decode().replace("\r\n", "\n").replace("\r", "\n")}
                return
            for number, line in enumerate(lines_of(file, ROW), 1):
                yield _row(line, f"{path}, row {number}")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start:,}") from None
    except (MalformedError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _unpacked(path: Path, raw: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw


def _row(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = parse_json(line, depth=METADATA_DEPTH, containers=ROW_CONTAINERS)
    except MalformedError as error:
        raise DataError(f"{place}: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise DataError(f"{place}: not a JSON object with a `text`")
    return row


class Sequences(ABC):
    """Training sequences of token ids."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sequence(self, index: int, seed: int) -> list[int]:
        """One sequence; `seed` determines everything random in it."""


class ReadingSequences(Sequences):
    """`document, question, answer, question, answer, ...`: a document, then questions on it in any order.

    Such sequences teach an LM to answer from the text before the question, several times for each document read.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        questions: dict[str, list[Question]],
        encoder: PromptEncoder,
        length: int,
    ) -> None:
        self._documents = documents
        self._questions = questions
        self._encoder = encoder
        self._length = length

    def __len__(self) -> int:
        return len(self._documents)

    def sequence(self, index: int, seed: int) -> list[int]:
        document, encoder = self._documents[index], self._encoder
        ids = encoder.prompt_start([document.text])
        questions = list(self._questions[document.id])
        random.Random(seed).shuffle(questions)
        for question in questions:
            pair = encoder.question(question.question) + encoder.answer(question.answers[0])
            if len(ids) + len(pair) > self._length:
                break
            ids += pair
        return ids[: self._length]
