"""Files of a user's own data, as several tests write and read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mac_rag.data import load_dataset
from mac_rag.data.types import QADataset

TEXTS = ["Ada Voss opened the bridge in May.", "A ferry crossed the river for 90 years.", "Nobody asks about this."]
QUESTIONS = [
    ("q0", "Who opened the bridge?", ["Ada Voss", "Voss"], 0),
    ("q1", "What crossed the river?", ["A ferry"], 1),
    ("q2", "When did it open?", ["in May", "May"], 0),
]
ASKED = [(question, answers, TEXTS[place]) for _, question, answers, place in QUESTIONS]


def lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows(**changes: Any) -> list[dict[str, Any]]:
    return [
        {"id": name, "document": TEXTS[place], "question": question, "answers": answers, **changes}
        for name, question, answers, place in QUESTIONS
    ]


def read(path: Path | str, split: str = "all", columns: dict[str, str] | None = None) -> QADataset:
    return load_dataset("own", split, path, columns=columns)


def asked(data: QADataset) -> list[tuple[str, set[str], str]]:
    texts = {document.id: document.text for document in data.documents}
    return [(question.question, set(question.answers), texts[question.gold]) for question in data.questions]


def json_lines(folder: Path) -> Path:
    return lines(folder / "rows.jsonl", rows())


def documents_and_questions(folder: Path) -> Path:
    lines(folder / "documents.jsonl", [{"id": f"d{i}", "text": text, "n": i} for i, text in enumerate(TEXTS)])
    lines(
        folder / "questions.jsonl",
        [{"id": n, "question": q, "answers": a, "document_id": f"d{i}"} for n, q, a, i in QUESTIONS],
    )
    return folder


def flash_rag(folder: Path) -> Path:
    """Its files, with the ids of documents that it does not have itself."""
    lines(folder / "corpus.jsonl", [{"id": i, "contents": text} for i, text in enumerate(TEXTS)])
    lines(
        folder / "dev.jsonl",
        [{"id": n, "question": q, "golden_answers": a, "document_id": i} for n, q, a, i in QUESTIONS],
    )
    return folder
