"""Paragraphs of text files for the amortization network: they need no questions, and of them there are many."""

from __future__ import annotations

import random
from itertools import islice

from pydantic import Field, model_validator

from mac_rag.config import Config
from mac_rag.errors import DataError
from pipelines.corpora.cloze import is_paragraph
from pipelines.corpora.text import file_texts, text_files


class UnaskedConfig(Config):
    """Documents without questions, in each batch beside those that are asked about.

    They are more to aggregate from, and the reconstruction loss is on them, too.

    Attributes:
        files: glob of `.txt`, `.jsonl` or `.jsonl.gz` files; a jsonl row holds its text under `text`. Their paragraphs
            are taken that are neither headings nor too long to read at once.
        documents: how many in each batch.
        paragraphs: of the files, that are drawn from; the same number of the first ones of each file.
    """

    files: str | None = None
    documents: int = Field(0, ge=0)
    paragraphs: int = Field(50_000, ge=1)

    @model_validator(mode="after")
    def _check(self) -> UnaskedConfig:
        if (self.files is None) != (self.documents == 0):
            raise ValueError("unasked.files and unasked.documents go together")
        return self


class Unasked:
    """Draws from the paragraphs of files.

    Raises:
        DataError: when nothing matches, or there are fewer paragraphs than one batch takes.
    """

    def __init__(self, config: UnaskedConfig) -> None:
        self._count = config.documents
        self._paragraphs: list[str] = []
        if config.files is None:
            return
        paths = text_files(config.files)
        most = -(-config.paragraphs // len(paths))
        for path in paths:
            lines = (line for text in file_texts(path) for line in text.split("\n"))
            self._paragraphs += islice(filter(is_paragraph, lines), most)
        if len(self._paragraphs) < self._count:
            raise DataError(
                f"{config.files!r} has {len(self._paragraphs)} paragraphs, but a batch takes {self._count} "
                "(unasked.documents)"
            )

    def draw(self, rng: random.Random) -> list[str]:
        """As many different paragraphs as a batch takes."""
        return rng.sample(self._paragraphs, self._count)
