"""StreamingQA as it is released: questions in `.jsonl.gz` files, about articles of the WMT News Crawl."""

from __future__ import annotations

import base64
import binascii
import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from mac_rag.data.types import Document, QADataset, Question, shortest_first
from mac_rag.errors import DataError
from mac_rag.untrusted_files import ROW, MalformedError, lines_of, open_file, parse_json


class SplitRange(NamedTuple):
    """The rows of a released file, with its published spelling, that make up one split."""

    file: str
    start: int
    stop: int


# As many questions as Hu et al. (2023) and the paper have. Their lists of questions are not released with the data.
PARTS = {
    "qa_train": SplitRange("streaminqa_train.jsonl.gz", 0, 40_000),
    "train": SplitRange("streaminqa_train.jsonl.gz", 40_000, 61_000),
    "qa_val": SplitRange("streaminqa_valid.jsonl.gz", 0, 4_000),
    "val": SplitRange("streaminqa_valid.jsonl.gz", 4_000, 5_700),
    "test": SplitRange("streaminqa_eval.jsonl.gz", 0, 5_000),
}
_ARTICLES = "news-docs.*.gz"
_KEY = re.compile(r"(\d{8})\d{12}\x00\x01([0-9a-f]{64})\x00\x01")


def read_released(folder: Path, split: str) -> QADataset:
    """Reads one split from the released files; an article is a document with its date.

    Args:
        folder: holds the files of the questions, and `news-docs.<year>.en.filtered.gz` of the WMT News Crawl, with the
            articles. Questions whose article is in none of these are left out, and a note counts them.
        split: one of `PARTS`.

    Raises:
        DataError: for a file that is missing or malformed, named with its line; if no article is found.
    """
    part = PARTS[split]
    file = folder / part.file
    rows = []
    for number, line in enumerate(_lines(file), 1):
        if number > part.stop:
            break
        if number > part.start:
            rows.append(_row(f"{file}, line {number}", line))
    texts = _articles(folder, {key for _, _, key in rows})
    documents: dict[tuple[str, str], Document] = {}
    questions = []
    for number, (question, answers, key) in enumerate(rows, part.start + 1):
        if key not in texts:
            continue
        date, digest = key
        iso = f"{date[:4]}-{date[4:6]}-{date[6:]}"
        document = documents.setdefault(key, Document(f"wmt-{date}-{digest[:16]}", texts[key], {"date": iso}))
        questions.append(Question(f"{split}-{number}", question, answers, document.id))
    if not questions:
        raise DataError(
            f"{folder} holds none of the articles of {file.name}; put news-docs.<year>.en.filtered.gz of the WMT News "
            "Crawl there"
        )
    notes = [
        f"{split} is rows {part.start + 1:,} to {part.stop:,} of {file.name}; the paper's own choice is not released"
    ]
    if len(questions) < len(rows):
        notes.append(
            f"{len(rows) - len(questions):,} of {len(rows):,} questions are left out, because their articles are in no "
            f"{_ARTICLES} of {folder}"
        )
    return QADataset("streamingqa", split, tuple(documents.values()), tuple(questions), tuple(notes))


def _row(where: str, line: bytes) -> tuple[str, tuple[str, ...], tuple[str, str]]:
    """Question, answers, and date and digest of the article."""
    try:
        values: Any = parse_json(line)
    except MalformedError as error:
        raise DataError(f"{where}: {error}") from None
    values = values if isinstance(values, dict) else {}
    question, given, name = (values.get(field) for field in ("question", "answers", "evidence_id"))
    key = _KEY.fullmatch(name) if isinstance(name, str) else None
    texts = [text for text in given if isinstance(text, str)] if isinstance(given, list) else []
    answers = shortest_first(texts)
    if not isinstance(question, str) or not question.strip() or not answers or key is None:
        raise DataError(f"{where}: not a question of StreamingQA; it needs question, answers and evidence_id")
    return question.strip(), answers, (key[1], key[2])


def _articles(folder: Path, wanted: set[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """The texts of wanted articles; a line of a file has date, article in sentences, and the article that is hashed."""
    texts: dict[tuple[str, str], str] = {}
    for file in sorted(folder.glob(_ARTICLES)):
        for number, line in enumerate(_lines(file), 1):
            date, *parts = line.strip().split(b"\t")
            if len(parts) != 2:
                raise DataError(
                    f"{file}, line {number}: it has {len(parts) + 1} fields, not 3; download the file again"
                )
            key = date.decode("ascii", "replace"), hashlib.sha256(parts[1]).hexdigest()
            if key in wanted:
                try:
                    texts[key] = base64.b64decode(parts[0], validate=True).decode()
                except (binascii.Error, UnicodeDecodeError) as error:
                    raise DataError(f"{file}, line {number}: not an article in Base64: {error}") from None
    return texts


def _lines(file: Path) -> Iterator[bytes]:
    """The lines of a packed file, each of a bounded size."""
    try:
        with open_file(file, follow=True) as packed, gzip.open(packed) as content:
            yield from lines_of(cast(BinaryIO, content), ROW)
    except FileNotFoundError:
        raise DataError(f"there is no {file}; give the folder that holds it") from None
    except (OSError, EOFError, zlib.error, MalformedError) as error:
        raise DataError(f"{file} cannot be read: {error}; download it again") from None
