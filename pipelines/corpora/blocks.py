"""Token blocks of equal length on disk: texts cut into blocks, or whole sequences packed into them.

Text files and a data set are tokenized once, file by file, so that interrupted work goes on.
"""

from __future__ import annotations

import os
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mac_rag.data.types import Document, QADataset, Question
from mac_rag.errors import DataError
from mac_rag.lm.prompt import PromptEncoder
from mac_rag.progress import progress_bar
from pipelines.corpora.cloze import cloze_questions, is_paragraph
from pipelines.corpora.text import SEED, CorpusConfig, ReadingSequences, Sequences, file_texts, text_files

_OPEN = 64  # blocks that `pack` keeps open; more would save little padding
_CLOZE_QUESTIONS = 5  # at most, on each paragraph
_AT_ONCE = 256  # texts tokenized in one call


class Blocks(Sequences):
    """Blocks in one or several memory-mapped `.npy` files.

    Args:
        parts: token ids `[N_i, L]` of each file.
    """

    def __init__(self, parts: Sequence[NDArray[np.unsignedinteger]]) -> None:
        self._parts = [part for part in parts if len(part)]
        self._ends = list(accumulate(map(len, self._parts)))

    @classmethod
    def open(cls, paths: Sequence[Path]) -> Blocks:
        return cls([np.load(path, mmap_mode="r", allow_pickle=False) for path in paths])

    def split(self, held_out: int) -> tuple[Blocks, Blocks]:
        """All blocks but the last `held_out`, and these last ones.

        Raises:
            DataError: if there are no others.
        """
        first = len(self) - held_out
        if first < 1:
            raise DataError(f"validation_documents is {held_out}, but the corpus fills only {len(self)} sequences")
        starts = [end - len(part) for end, part in zip(self._ends, self._parts, strict=True)]
        pairs = list(zip(starts, self._parts, strict=True))
        before = [part[: max(0, first - start)] for start, part in pairs]
        behind = [part[max(0, first - start) :] for start, part in pairs]
        return Blocks(before), Blocks(behind)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def sequence(self, index: int, seed: int) -> list[int]:
        part = bisect_right(self._ends, index)
        ids: list[int] = self._parts[part][index - self._ends[part]].tolist()
        return ids


def write_blocks(path: Path, blocks: Iterable[Sequence[int]], length: int, vocabulary: int) -> None:
    """Writes blocks of `length` ids atomically, in 16 bits, or in 32 if the vocabulary needs them."""
    dtype = np.uint16 if vocabulary <= 2**16 else np.uint32
    rows = [np.asarray(block, dtype=dtype) for block in blocks]
    array = np.stack(rows) if rows else np.empty((0, length), dtype=dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(f".{os.getpid()}")
    with whole.open("wb") as file:
        np.save(file, array, allow_pickle=False)
    whole.replace(path)


def cut(rows: Iterable[Sequence[int]], length: int) -> Iterator[list[int]]:
    """Joins rows and cuts them into blocks; drops the rest at the end."""
    stream: list[int] = []
    for row in rows:
        stream.extend(row)
        whole = len(stream) // length * length
        yield from (stream[first : first + length] for first in range(0, whole, length))
        del stream[:whole]


def pack(rows: Iterable[Sequence[int]], length: int, pad: int) -> Iterator[list[int]]:
    """Sequence packing: puts each row whole into the fullest open block with room for it; blocks end in padding.

    A row longer than a block is cut at its end.
    """
    blocks: list[list[int]] = []
    for row in rows:
        row = list(row[:length])
        roomy = [block for block in blocks if len(block) + len(row) <= length]
        if roomy:
            max(roomy, key=len).extend(row)
            continue
        if len(blocks) == _OPEN:
            fullest = max(range(_OPEN), key=lambda i: len(blocks[i]))
            yield _padded(blocks.pop(fullest), length, pad)
        blocks.append(row)
    yield from (_padded(block, length, pad) for block in blocks)


def _padded(block: list[int], length: int, pad: int) -> list[int]:
    return block + [pad] * (length - len(block))


class Preparation:
    """Writes the blocks of a corpus that its folder lacks.

    Args:
        folder: folder of the blocks of one corpus and one tokenizer.
        config: the corpus.
        encoder: the LM's prompt encoder.
    """

    def __init__(self, folder: Path, config: CorpusConfig, encoder: PromptEncoder) -> None:
        self._folder = folder
        self._config = config
        self._encoder = encoder

    def texts(self) -> tuple[Blocks, Blocks]:
        """Blocks of plain text, and of paragraphs with questions made from them.

        Raises:
            DataError: see `text_files` and `file_texts`.
        """
        sources = text_files(str(self._config.files))
        kinds = [self._folder / "text", self._folder / "cloze"]
        parts = [[kind / f"{number:05d}.npy" for number in range(len(sources))] for kind in kinds]
        with progress_bar("tokenize", len(sources)) as bar:
            for number, (source, text, cloze) in enumerate(zip(sources, *parts, strict=True)):
                if not (text.exists() and cloze.exists()):
                    self._file(source, number, text, cloze)
                bar.advance()
        return Blocks.open(parts[0]), Blocks.open(parts[1])

    def questions(self, data: QADataset) -> Blocks:
        """Blocks of the documents of a data set with their questions."""
        path = self._folder / "questions.npy"
        if not path.exists():
            self._write(path, self._reading_blocks(data.documents, data.questions_by_document()))
        return Blocks.open([path])

    def _file(self, source: Path, number: int, text: Path, cloze: Path) -> None:
        rng = random.Random(f"{SEED}/{number}")
        plain: list[str] = []
        documents: list[Document] = []
        for article in file_texts(source):
            lines = []
            for line in article.split("\n"):
                if is_paragraph(line) and rng.random() < self._config.cloze:
                    documents.append(Document(f"{number}-{len(documents)}", line))
                else:
                    lines.append(line)
            if lines:
                plain.append("\n".join(lines))
        questions = {document.id: cloze_questions(document, _CLOZE_QUESTIONS, rng) for document in documents}
        self._write(cloze, self._reading_blocks(documents, questions))
        self._write(text, cut(self._tokenized(plain), self._config.sequence_length))

    def _tokenized(self, texts: Sequence[str]) -> Iterator[list[int]]:
        for first in range(0, len(texts), _AT_ONCE):
            some = texts[first : first + _AT_ONCE]
            for ids in self._encoder.texts.batch(some):
                yield [*self._encoder.start, *ids, self._encoder.eos]

    def _reading_blocks(
        self, documents: Sequence[Document], questions: dict[str, list[Question]]
    ) -> Iterator[list[int]]:
        length = self._config.sequence_length
        with_questions = [document for document in documents if questions[document.id]]
        rows = ReadingSequences(with_questions, questions, self._encoder, length)
        pad: int = self._encoder.tokenizer.pad_token_id
        return pack((rows.sequence(index, index) for index in range(len(rows))), length, pad)

    def _write(self, path: Path, blocks: Iterator[list[int]]) -> None:
        write_blocks(path, blocks, self._config.sequence_length, len(self._encoder.tokenizer))
