"""Texts and how they go on, as questions: what keeps an LM that is tuned on short answers writing prose."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from mac_rag.data.own import drawn_split
from mac_rag.data.readers import find_files, read_documents
from mac_rag.data.types import Document, QADataset, Question
from mac_rag.errors import DataError

# Words of a text that are the document, the beginning of what follows it, and how that goes on.
_DOCUMENT, _BEGINNING, _REST = 100, 20, 32
_WORD = re.compile(r"\S+\s*")


def read_continuations(path: str | Path, split: str, *, documents: int | None = None) -> QADataset:
    """A data set of documents, each with one question: to go on with the passage that followed it.

    Args:
        path: a file or folder as `mac_rag.data.readers.read_documents` takes them.
        split: `train`, `val` or `test`; texts are divided by title.
        documents: most documents, the first ones; None for all.

    Raises:
        DataError: for files that cannot be read, and if no text is long enough; names them.
    """
    texts = read_documents(find_files([Path(path)]))
    made = [_cut(text) for text in texts if drawn_split(text) == split]
    kept = [pair for pair in made if pair is not None][:documents]
    if not kept:
        needed = _DOCUMENT + _BEGINNING + _REST
        raise DataError(f"{path} holds no text of {needed} words for the split {split!r}; give longer or more texts")
    return QADataset("continuations", split, *(tuple(column) for column in zip(*kept, strict=True)))


def _cut(text: Document) -> tuple[Document, Question] | None:
    """The beginning of a text, and the question how it goes on; None for a short text."""
    words = _WORD.findall(text.text)
    if len(words) < _DOCUMENT + _BEGINNING + _REST:
        return None
    document, beginning, rest = _joined(words, 0, _DOCUMENT, _DOCUMENT + _BEGINNING, _DOCUMENT + _BEGINNING + _REST)
    return (
        Document(text.id, document, text.metadata),
        Question(text.id, f"Go on with this text: {beginning}", (rest,), text.id),
    )


def _joined(words: list[str], *bounds: int) -> Iterable[str]:
    return ("".join(words[start:end]).strip() for start, end in pairwise(bounds))
