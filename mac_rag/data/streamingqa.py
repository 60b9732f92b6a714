"""StreamingQA: news articles with questions, from CSV files with the columns `text`, `question` and `answers`."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mac_rag.data.table import read_table, split_file
from mac_rag.data.types import Document, QADataset, Question, shortest_first

SPLITS = ("train", "val", "test", "qa_train", "qa_val")

_COLUMNS = ("text", "question", "answers")


def read_streamingqa(path: str | Path, split: str) -> QADataset:
    """Reads one split. Its rows are the stream; rows with the same text are about the same document.

    The id of a document is a hash of its text, so it is the same in every split and file. The column `answers` holds
    the accepted answers, separated by backslashes.

    Args:
        path: folder with `<split>.csv`, or the file.
        split: one of `SPLITS`.

    Raises:
        DataError: for a missing file or column, or a malformed row, named with its number and column.
    """
    documents: dict[str, Document] = {}
    questions: list[Question] = []
    for row in read_table(split_file(path, split), _COLUMNS):
        text = row.filled("text")
        document_id = f"streamingqa-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        documents.setdefault(document_id, Document(document_id, text))
        answers = shortest_first(row.filled("answers").split("\\"))
        if not answers:
            raise row.fault("answers", "it holds separators but no answer; give one, or remove the row")
        question = row.filled("question").strip()
        questions.append(Question(f"{split}-{row.number}", question, answers, document_id))
    return QADataset("streamingqa", split, tuple(documents.values()), tuple(questions))
