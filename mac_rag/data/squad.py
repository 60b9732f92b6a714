"""SQuAD-Seq: the paragraphs of SQuAD v1.1 as a stream of documents, split by rows as in the paper."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mac_rag.data.types import Document, QADataset, Question, shortest_first
from mac_rag.errors import DataError
from mac_rag.untrusted_files import MalformedError, parse_json, read_unpacked

_LARGEST = 64 << 20  # most bytes of a file in SQuAD's layout, twice the size of SQuAD's own


@dataclass(frozen=True, slots=True)
class SplitRange:
    """The rows of an official file that make up one split.

    Attributes:
        file: name of the official file, without `.gz`.
        start: first row (question) of the split.
        stop: first row after the split.
        rows: number of questions in the whole file, which identifies the file that the paper split.
    """

    file: str
    start: int
    stop: int
    rows: int


PARTS = {
    "qa_lt": SplitRange("train-v1.1.json", 0, 40_006, 87_599),
    "qa_lt_val": SplitRange("train-v1.1.json", 40_006, 42_118, 87_599),
    "train": SplitRange("train-v1.1.json", 42_118, 82_011, 87_599),
    "val": SplitRange("train-v1.1.json", 82_011, 87_599, 87_599),
    "test": SplitRange("dev-v1.1.json", 0, 10_570, 10_570),
}
SPLITS = tuple(PARTS)


@dataclass(frozen=True, slots=True)
class SquadRow:
    """One question with its paragraph and its article's title, as in the official files."""

    title: str
    context: str
    id: str
    question: str
    answers: tuple[str, ...]


def read_squad(path: str | Path, split: str) -> QADataset:
    """Reads one split from the official JSON file, plain or gzipped.

    The documents are the distinct paragraphs in the order of articles. The shortest accepted answer comes first.

    Args:
        path: folder with `train-v1.1.json` and `dev-v1.1.json` (or `.json.gz`), or the file itself.
        split: one of `SPLITS`.

    Raises:
        DataError: if the file is missing or damaged, or does not have the layout and size of SQuAD.
    """
    part = PARTS[split]
    file = _find(Path(path), part)
    return select_rows(list(read_official(file)), part, split, str(file))


def read_official(file: Path) -> Iterator[SquadRow]:
    """Yields the questions of a file in the official layout, in order.

    Raises:
        DataError: as `paragraph_rows`, and for a question without an id, a title or answers.
    """
    for where, row in paragraph_rows(file):
        if "question" in row:
            answers = [_field(answer, "text", str, where) for answer in _field(row, "answers", list, where)]
            title, context, name, question = (
                _field(row, field, str, where) for field in ("title", "document", "id", "question")
            )
            yield SquadRow(title, context, name, question, tuple(answers))


def paragraph_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the questions of a file in SQuAD's layout, plain or gzipped, each after its position for messages.

    The layout is `{"data": [{"title": ..., "paragraphs": [{"context": ..., "qas": [...]}]}]}`. A row has `document`,
    `title` and the fields of the question in `qas`; a paragraph without questions gives a row without `question`.

    Raises:
        DataError: for a file that cannot be read or has another layout; names the file, article and paragraph.
    """
    try:
        articles = _field(parse_json(read_unpacked(path, _LARGEST)), "data", list, "all of it")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except (MalformedError, DataError) as error:
        raise DataError(
            f"{path} is not a SQuAD file in the official JSON layout: {error}; give data in another form as "
            "JSON Lines, one question per line, in a file that ends in .jsonl"
        ) from None
    for number, article in enumerate(articles, 1):
        place = f"{path}, article {number}"
        title = _field(article, "title", str, place) if "title" in _object(article, place) else None
        for position, paragraph in enumerate(_field(article, "paragraphs", list, place), 1):
            where = f"{place}, paragraph {position}"
            shared = {"document": _field(paragraph, "context", str, where), "title": title}
            questions = _field(paragraph, "qas", list, where)
            if not questions:
                yield where, shared
            for index, question in enumerate(questions, 1):
                name = f"{where}, question {index}"
                _field(question, "question", str, name)
                yield name, {**question, **shared}


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: not a JSON object but {type(value).__name__}")
    return value


def _field(value: Any, name: str, kind: type, where: str) -> Any:
    content = _object(value, where)
    if not isinstance(content.get(name), kind):
        got = f"got {content[name]!r:.80}" if name in content else f"it has {', '.join(map(repr, content)):.200}"
        raise DataError(f"{where}, field {name!r}: it must be a {'text' if kind is str else 'list'}; {got}")
    return content[name]


def select_rows(rows: Sequence[SquadRow], part: SplitRange, split: str, source: str) -> QADataset:
    """The documents and questions of one split.

    The id of a document is the title of its article, reduced to letters, digits, `.`, `_` and `-`, and the number of
    the paragraph in the split.

    Args:
        rows: all rows of the file.
        part: the rows of the split.
        split: name of the split.
        source: name of the file, for messages.

    Raises:
        DataError: if the number of rows is not that of the file that the paper split, or a row has no text, question or
            answer.
    """
    if len(rows) != part.rows:
        raise DataError(
            f"{source} has {len(rows):,} questions, not the {part.rows:,} of SQuAD's {part.file}; give that file, "
            f"because the paper's split {split!r} is a range of its rows"
        )
    documents: dict[tuple[str, str], Document] = {}
    paragraphs: Counter[str] = Counter()
    questions: list[Question] = []
    for number, row in enumerate(rows[part.start : part.stop], part.start):
        answers = shortest_first(row.answers)
        if not (row.context.strip() and row.question.strip() and answers):
            raise DataError(f"{source}, row {number} ({row.id!r}): paragraph, question or every answer is empty")
        key = (row.title, row.context)
        if key not in documents:
            slug = re.sub(r"[^\w.-]+", "_", row.title)
            document_id = f"{slug}-{paragraphs[slug]:03d}"
            paragraphs[slug] += 1
            documents[key] = Document(document_id, row.context, {"title": row.title})
        questions.append(Question(row.id, row.question.strip(), answers, documents[key].id))
    return QADataset("squad", split, tuple(documents.values()), tuple(questions))


def _find(path: Path, part: SplitRange) -> Path:
    candidates = [path / part.file, path / f"{part.file}.gz"] if path.is_dir() else [path]
    for file in candidates:
        if file.is_file():
            return file
    raise DataError(f"there is no {' or '.join(map(str, candidates))}; give the folder that holds it")
