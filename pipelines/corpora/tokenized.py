"""Text files and a data set, tokenized once into blocks on disk, file by file: interrupted work goes on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from mac_rag.data.types import Document, QADataset, Question
from mac_rag.lm.prompt import PromptEncoder
from mac_rag.progress import progress_bar
from pipelines.corpora.blocks import Blocks, cut, pack, write_blocks
from pipelines.corpora.cloze import cloze_questions, is_paragraph
from pipelines.corpora.text import CorpusConfig, ReadingSequences, file_texts, text_files

_CLOZE_QUESTIONS = 5  # at most, on each paragraph
_AT_ONCE = 256  # texts tokenized in one call


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
        rng = random.Random(f"{self._config.seed}/{number}")
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
        rows = ReadingSequences(with_questions, questions, self._encoder, (1,), length)
        pad: int = self._encoder.tokenizer.pad_token_id
        return pack((rows.sequence(index, index) for index in range(len(rows))), length, pad)

    def _write(self, path: Path, blocks: Iterator[list[int]]) -> None:
        write_blocks(path, blocks, self._config.sequence_length, len(self._encoder.tokenizer))
