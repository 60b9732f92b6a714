"""ArchivalQA-Seq: paragraphs as documents, a round trip through CSV, malformed rows named."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.data.archivalqa import COLUMNS, read_archivalqa, write_archivalqa
from mac_rag.data.types import Document, QADataset, Question
from mac_rag.errors import DataError

ROW = {
    "question": "Who won?",
    "answer": "Haarhuis",
    "para_id": "1043631_15",
    "doc_id": "1043631",
    "title": "TENNIS",
    "date": "1998-09-05",
    "text": "['one', 'two']",
    "para_num": "15",
    "ans_paragraph": "Haarhuis won.",
    "ans_text": "one\nHaarhuis won.",
    "year": "1998",
}


def write(file: Path, *changes: dict[str, str], without: str = "") -> Path:
    """Writes the row above, once for each dictionary of changed cells."""
    columns = [
        column for column in dict.fromkeys((*ROW, *(key for change in changes for key in change))) if column != without
    ]
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({**ROW, **change} for change in changes)
    return file


def test_each_paragraph_is_one_document_in_the_order_of_the_stream(tmp_path: Path) -> None:
    other = {"para_id": "1043631_16", "ans_paragraph": "Rafter lost.", "title": "", "question": " Who lost? "}
    file = write(tmp_path / "train.csv", other, {}, {**other, "question": "Who?"})
    dataset = read_archivalqa(file, "train")
    assert dataset.documents == (
        Document("1043631_16", "Rafter lost.", {"title": "", "date": "1998-09-05"}),
        Document("1043631_15", "Haarhuis won.", {"title": "TENNIS", "date": "1998-09-05"}),
    )
    assert dataset.questions == (
        Question("train-1", "Who lost?", ("Haarhuis",), "1043631_16"),
        Question("train-2", "Who won?", ("Haarhuis",), "1043631_15"),
        Question("train-3", "Who?", ("Haarhuis",), "1043631_16"),
    )
    assert read_archivalqa(tmp_path, "train") == dataset


def test_the_public_ids_of_questions_are_kept(tmp_path: Path) -> None:
    dataset = read_archivalqa(write(tmp_path / "val.csv", {"id": "val_45"}, {"id": ""}), "val")
    assert [question.id for question in dataset.questions] == ["val_45", "val-2"]


def test_rows_with_an_empty_paragraph_are_left_out_and_counted(tmp_path: Path) -> None:
    file = write(tmp_path / "test.csv", {}, {"para_id": "1_1", "ans_paragraph": " "}, {"para_id": "1_2"})
    dataset = read_archivalqa(file, "test")
    assert [document.id for document in dataset.documents] == ["1043631_15", "1_2"]
    assert len(dataset.questions) == 2
    assert dataset.notes == ("1 questions are left out, because their paragraph is empty",)


@pytest.mark.parametrize("column", ["question", "answer", "para_id", "title", "date", "ans_paragraph"])
def test_a_missing_column_is_named(tmp_path: Path, column: str) -> None:
    file = write(tmp_path / "test.csv", {}, without=column)
    with pytest.raises(DataError, match=f"test.csv: missing column '{column}'"):
        read_archivalqa(file, "test")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        *(
            ([{}, {column: " "}], rf"row 2 \(line 4\), column '{column}': the cell is empty")
            for column in ("question", "answer", "para_id", "date")
        ),
        *(
            ([{"date": date}], rf"row 1 .*, column 'date': '{date}' is not a date")
            for date in ("None-None-None", "1998-9-5", "19980905", "1998-02-30")
        ),
        *(
            ([{}, change], r"row 2 .*, column 'para_id': '1043631_15' names a document with another")
            for change in ({"ans_paragraph": "Another text."}, {"title": "GOLF"}, {"date": "1999-01-01"})
        ),
        ([{"id": "test_1"}] * 2, r"row 2 .*, column 'id': 'test_1' is the id of another question"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, rows: list[dict[str, str]], message: str) -> None:
    file = write(tmp_path / "test.csv", *rows)
    with pytest.raises(DataError, match=f"test.csv, {message}"):
        read_archivalqa(file, "test")


characters = st.characters(codec="utf-8", exclude_characters="\0")
texts = st.text(characters, min_size=1).filter(lambda text: bool(text.strip()))
stripped = texts.map(str.strip)


@st.composite
def datasets(draw: st.DrawFn) -> QADataset:
    """Dated documents in the order in which questions, not grouped by document, first ask about them."""
    ids = draw(st.lists(texts, min_size=1, max_size=5, unique=True))
    documents = [
        Document(
            name,
            draw(texts),
            {
                "title": draw(st.text(characters)),
                "date": draw(st.dates()).isoformat(),
                **({"updates": draw(texts)} if draw(st.booleans()) else {}),
            },
        )
        for name in ids
    ]
    asked = ids + draw(st.lists(st.sampled_from(ids), max_size=5))
    names = draw(st.lists(texts, min_size=len(asked), max_size=len(asked), unique=True))
    questions = [Question(name, draw(stripped), (draw(stripped),), document) for name, document in zip(names, asked)]
    return QADataset("anything", "train", tuple(documents), tuple(questions))


@settings(max_examples=100, deadline=None)
@given(dataset=datasets())
def test_what_is_written_is_read_back_identically(dataset: QADataset, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("round-trip") / "any.csv"
    write_archivalqa(dataset, file)
    again = read_archivalqa(file, "train")
    assert again.documents == dataset.documents
    assert again.questions == dataset.questions


def test_a_written_row_fills_the_published_schema(tmp_path: Path) -> None:
    document = Document("1043631_15", "Haarhuis won.", {"title": "TENNIS", "date": "1998-09-05"})
    question = Question("test_84", "Who won?", ("Haarhuis",), document.id)
    write_archivalqa(QADataset("archivalqa", "test", (document,), (question,)), tmp_path / "test.csv")
    with (tmp_path / "test.csv").open(newline="") as stream:
        (row,) = csv.DictReader(stream)
    assert tuple(row) == COLUMNS
    expected = {**ROW, "id": "test_84", "text": '["Haarhuis won."]', "ans_text": "Haarhuis won.", "updates": ""}
    assert row == expected
    assert json.loads(row["text"]) == ["Haarhuis won."]


def one(document: Document, *answers: str) -> QADataset:
    return QADataset("any", "train", (document,), (Question("q", "Who?", answers, document.id),))


def test_what_the_schema_cannot_hold_is_refused(tmp_path: Path) -> None:
    dated = {"title": "t", "date": "2000-01-01"}
    first, second = Document("1", "one", dated), Document("2", "two", dated)
    asked = (Question("a", "?", ("x",), "2"), Question("b", "?", ("x",), "1"))
    cases = {
        "'1' has no question": QADataset("any", "train", (first, second), asked[:1]),
        "in the order in which the questions first ask": QADataset("any", "train", (first, second), asked),
        "'q' has 2 answers": one(first, "x", "y"),
        r"cannot hold: \['source'\]": one(Document("1", "one", {**dated, "source": "wire"}), "x"),
        "has the date '' in its metadata; give one such as 2004-01-31": one(Document("1", "one"), "x"),
    }
    for message, dataset in cases.items():
        with pytest.raises(DataError, match=message):
            write_archivalqa(dataset, tmp_path / "train.csv")
    assert not (tmp_path / "train.csv").exists()
