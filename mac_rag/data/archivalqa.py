"""The paper's two streams of news in CSV files: StreamingQA, and ArchivalQA-Seq with dated paragraphs.

`pipelines.prepare_archivalqa` makes ArchivalQA's files from the public questions and a user's own copy of the articles.
`write_archivalqa` writes any data set with the same columns.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mac_rag.data.streamingqa import PARTS, read_released
from mac_rag.data.table import read_table, split_file, write_table
from mac_rag.data.types import Document, QADataset, Question, shortest_first
from mac_rag.errors import DataError

SPLITS = ("train", "val", "test", "qa_lt", "qa_lt_val")
STREAMINGQA_SPLITS = ("train", "val", "test", "qa_train", "qa_val")

# The published schema, with two more columns: first the question's id, last the id of the document that this one
# supersedes. Files without these two columns, or with further ones, can also be read.
COLUMNS = (
    "id", "question", "answer", "para_id", "doc_id", "title", "date", "text", "para_num", "ans_paragraph", "ans_text",
    "year", "updates",
)  # fmt: skip

_READ = ("question", "answer", "para_id", "title", "date", "ans_paragraph")
_METADATA = {"title", "date", "updates"}


def read_archivalqa(path: str | Path, split: str) -> QADataset:
    """Reads one split. Its rows are the stream; `ans_paragraph` is a document and `para_id` its id.

    Rows whose paragraph is empty, as some of the published pairing are, are left out, and a note counts them.

    Args:
        path: folder with `<split>.csv`, or the file.
        split: one of `SPLITS`.

    Raises:
        DataError: for a missing file or column, or a malformed row, named with its number and column; for a `para_id`
            of two different documents, or an `id` of two questions.
    """
    documents: dict[str, Document] = {}
    questions: dict[str, Question] = {}
    empty = 0
    for row in read_table(split_file(path, split), _READ):
        if not row.values["ans_paragraph"].strip():
            empty += 1
            continue
        metadata = {"title": row.values["title"], "date": row.filled("date")}
        if not _is_date(metadata["date"]):
            raise row.fault("date", f"{metadata['date']!r} is not a date such as 2004-01-31")
        if row.values.get("updates"):
            metadata["updates"] = row.values["updates"]
        document = Document(row.filled("para_id"), row.filled("ans_paragraph"), metadata)
        if documents.setdefault(document.id, document) != document:
            raise row.fault(
                "para_id", f"{document.id!r} names a document with another text, title or date in an earlier row"
            )
        question_id = row.values.get("id") or f"{split}-{row.number}"
        if question_id in questions:
            raise row.fault("id", f"{question_id!r} is the id of another question in an earlier row")
        question, answer = row.filled("question").strip(), row.filled("answer").strip()
        questions[question_id] = Question(question_id, question, (answer,), document.id)
    notes = (f"{empty:,} questions are left out, because their paragraph is empty",) if empty else ()
    return QADataset("archivalqa", split, tuple(documents.values()), tuple(questions.values()), notes)


def write_archivalqa(dataset: QADataset, path: str | Path) -> None:
    """Writes dated documents with their questions as one CSV file, each document as an article of one paragraph.

    `read_archivalqa` returns the same documents and questions.

    Args:
        dataset: documents in the order in which the questions first refer to them.
        path: the file.

    Raises:
        DataError: for data that the schema cannot hold: a document without a question, documents in a different order
            from their questions, a question with several answers, a document without a date or with metadata other
            than title, date and updates.
    """
    documents = {document.id: document for document in dataset.documents}
    order = list(dict.fromkeys(question.gold for question in dataset.questions))
    if order != list(documents):
        unused = next((name for name in documents if name not in set(order)), None)
        raise DataError(
            f"document {unused!r} has no question, and each row of the ArchivalQA schema is a question"
            if unused is not None
            else "the documents are not in the order in which the questions first ask about them; sort them so"
        )
    rows = (
        schema_row(question, documents[question.gold], [documents[question.gold].text])
        for question in dataset.questions
    )
    write_rows(rows, path)


def write_rows(rows: Iterable[Mapping[str, str]], path: str | Path) -> None:
    """Writes rows of `schema_row` as one CSV file."""
    write_table(Path(path), COLUMNS, rows)


def schema_row(question: Question, document: Document, paragraphs: Sequence[str]) -> dict[str, str]:
    """One row of the schema.

    Args:
        question: a question with one answer.
        document: the paragraph that answers it, with title and date as metadata.
        paragraphs: all paragraphs of its article; the column `text` holds them as a JSON list.

    Raises:
        DataError: see `write_archivalqa`.
    """
    if len(question.answers) != 1:
        raise DataError(
            f"question {question.id!r} has {len(question.answers)} answers, but the ArchivalQA schema holds one"
        )
    foreign = sorted(set(document.metadata) - _METADATA)
    if foreign:
        raise DataError(
            f"document {document.id!r} has metadata that the ArchivalQA schema cannot hold: {foreign}; leave them out"
        )
    title, date = document.metadata.get("title", ""), document.metadata.get("date", "")
    if not _is_date(date):
        raise DataError(f"document {document.id!r} has the date {date!r} in its metadata; give one such as 2004-01-31")
    article, number = split_paragraph_id(document.id) or (document.id, 0)
    return {
        "id": question.id,
        "question": question.question,
        "answer": question.answers[0],
        "para_id": document.id,
        "doc_id": article,
        "title": title,
        "date": date,
        "text": json.dumps(list(paragraphs), ensure_ascii=False),
        "para_num": str(number),
        "ans_paragraph": document.text,
        "ans_text": "\n".join(paragraphs),
        "year": date[:4],
        "updates": document.metadata.get("updates", ""),
    }


def split_paragraph_id(paragraph_id: str) -> tuple[str, int] | None:
    """Splits `<doc_id>_<paragraph number>`, with numbers from 0; None for any other id."""
    match = re.fullmatch(r"(\S+)_([0-9]{1,9})", paragraph_id)
    return (match[1], int(match[2])) if match else None


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def read_streamingqa(path: str | Path, split: str) -> QADataset:
    """Reads one split. Its rows are the stream; rows with the same text are about the same document.

    The id of a document is a hash of its text, so it is the same in every split and file. The column `answers` holds
    the accepted answers, separated by backslashes.

    Args:
        path: folder with `<split>.csv`, or the file; or a folder of the files as released, see
            `mac_rag.data.streamingqa`.
        split: one of `STREAMINGQA_SPLITS`.

    Raises:
        DataError: for a missing file or column, or a malformed row, named with its number and column.
    """
    if (Path(path) / PARTS[split].file).exists() and not split_file(path, split).exists():
        return read_released(Path(path), split)
    documents: dict[str, Document] = {}
    questions: list[Question] = []
    for row in read_table(split_file(path, split), ("text", "question", "answers")):
        text = row.filled("text")
        document_id = f"streamingqa-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        documents.setdefault(document_id, Document(document_id, text))
        answers = shortest_first(row.filled("answers").split("\\"))
        if not answers:
            raise row.fault("answers", "it holds separators but no answer; give one, or remove the row")
        question = row.filled("question").strip()
        questions.append(Question(f"{split}-{row.number}", question, answers, document_id))
    return QADataset("streamingqa", split, tuple(documents.values()), tuple(questions))
