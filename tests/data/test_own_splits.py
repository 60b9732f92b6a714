"""How a user's own data is divided, and questions that need several documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mac_rag.data import load_dataset
from mac_rag.data.own import drawn_split
from mac_rag.data.types import Document, first_documents
from mac_rag.errors import ConfigError, DataError
from tests.data.helpers import (
    QUESTIONS,
    flash_rag,
    lines,
    read,
    rows,
)


@given(st.text("xyz0189 ", min_size=1).filter(str.strip))
def test_the_split_is_that_of_the_words_alone(text: str) -> None:
    """So the same text is in one split whatever its id, its file and its punctuation."""
    assert drawn_split(Document("1", text)) == drawn_split(Document("2", f" The {text.upper()}!", {"date": "2024"}))


def test_one_file_is_divided_by_documents(tmp_path: Path) -> None:
    many = [
        {"document": f"Document {i // 2} tells of rain.", "question": f"What {i}?", "answers": "rain"}
        for i in range(4000)
    ]
    path = lines(tmp_path / "rows.jsonl", many)
    splits = {split: read(path, split) for split in ("train", "val", "test")}
    sizes = {split: len(data.documents) for split, data in splits.items()}
    assert sum(sizes.values()) == 2000
    assert abs(sizes["train"] - 1600) < 60
    assert abs(sizes["val"] - 200) < 50
    ids = [{document.id for document in data.documents} for data in splits.values()]
    assert len(set.union(*ids)) == sum(map(len, ids))
    for data in splits.values():
        assert len(data.questions) == 2 * len(data.documents)
        assert {question.gold for question in data.questions} == {document.id for document in data.documents}
    lines(path, [*many[1000:], *many[:1000], {"document": "New.", "question": "Who?", "answers": "New"}])
    again = read(path, "test")
    assert {document.id for document in again.documents} - {document.id for document in splits["test"].documents} <= {
        read(path).questions[-1].gold
    }


def test_documents_of_one_title_are_in_one_split(tmp_path: Path) -> None:
    many = [
        {"title": f"Title_{i % 40}", "document": f"{i}", "question": "Which?", "answers": str(i)} for i in range(400)
    ]
    path = lines(tmp_path / "rows.jsonl", many)
    titles = [
        {document.metadata["title"] for document in read(path, split).documents} for split in ("train", "val", "test")
    ]
    assert len(set.union(*titles)) == sum(map(len, titles)) == 40


def test_files_of_splits_are_used_as_they_are(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", rows()[:1])
    lines(tmp_path / "validation.jsonl", rows()[1:2])
    assert [question.id for question in read(tmp_path, "train").questions] == ["q0"]
    assert [question.id for question in read(tmp_path, "val").questions] == ["q1"]
    assert [question.id for question in read(tmp_path / "train.jsonl", "train").questions] == ["q0"]
    assert len(read(tmp_path).questions) == 2
    with pytest.raises(DataError, match=r"train and val by the names of its files, and no test; add test\.jsonl"):
        read(tmp_path, "test")
    lines(tmp_path / "test.jsonl", [{**rows()[2], "id": "q9"}])
    with pytest.raises(DataError, match=r"document 'doc-\w+' of .*test\.jsonl is also in .*train\.jsonl; remove it"):
        read(tmp_path, "train")


def test_questions_without_documents_have_the_whole_corpus_in_every_split(tmp_path: Path) -> None:
    flash_rag(tmp_path)
    lines(tmp_path / "test.jsonl", [{"id": n, "question": q, "golden_answers": a} for n, q, a, _ in QUESTIONS])
    (tmp_path / "dev.jsonl").unlink()
    data = read(tmp_path, "test")
    assert [document.id for document in data.documents] == ["0", "1", "2"]
    assert [question.document_id for question in data.questions] == [None] * 3
    with pytest.raises(DataError, match="question 'q0' names no document, but the document of each question is needed"):
        data.questions_by_document()
    assert load_dataset("own", "test", tmp_path, documents=3) == data
    with pytest.raises(ConfigError, match="first 2 of 3 documents were requested, but the questions name no documents"):
        load_dataset("own", "test", tmp_path, documents=2)
    lines(tmp_path / "dev.jsonl", [{"id": "x", "question": "Who?", "golden_answers": ["Ada"], "document_id": 0}])
    with pytest.raises(DataError, match="question 'q0' names no document, but others do"):
        read(tmp_path)


def test_ids_are_unique_within_a_split(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", rows(document_id="d")[:1])
    lines(tmp_path / "test.jsonl", [{**row, "id": "q0"} for row in rows(document_id="d")[1:2]])
    assert read(tmp_path, "train").questions[0].id == read(tmp_path, "test").questions[0].id == "q0"
    with pytest.raises(DataError, match="'d' is a document of two splits; the split 'all' needs other ids"):
        read(tmp_path)
    flash_rag(tmp_path / "flash")
    lines(tmp_path / "flash" / "test.jsonl", [{"id": "q0", "question": "?", "golden_answers": "x", "document_id": 2}])
    assert [question.id for question in read(tmp_path / "flash", "test").questions] == ["q0"]
    with pytest.raises(DataError, match="'q0' is a question of two splits"):
        read(tmp_path / "flash")


def test_no_document_is_asked_about_in_two_splits_of_a_corpus(tmp_path: Path) -> None:
    folder = flash_rag(tmp_path)
    lines(folder / "train.jsonl", [{"question": "What?", "answers": "A ferry", "document_id": "1"}])
    with pytest.raises(
        DataError, match=r"document '1' is asked about in .*train\.jsonl and in .*dev\.jsonl \(question 'q1'\)"
    ):
        read(folder, "train")


def of_several(name: str, answer_in: int, *further: int) -> dict[str, Any]:
    ids = {"document_id": f"d{answer_in}", "further_document_ids": [f"d{number}" for number in further]}
    return {"id": name, "question": "Who opened what Ada built?", "answers": "Eve", **ids}


def test_a_question_of_a_corpus_names_all_documents_that_it_needs(tmp_path: Path) -> None:
    lines(tmp_path / "documents.jsonl", [{"id": f"d{number}", "text": f"Text {number}."} for number in range(4)])
    lines(tmp_path / "train.jsonl", [of_several("a", 0, 1)])
    lines(tmp_path / "test.jsonl", [of_several("b", 2, 3)])
    assert [question.further_ids for question in read(tmp_path).questions] == [("d1",), ("d3",)]
    assert {"d2", "d3"} <= {document.id for document in read(tmp_path, "test").documents}
    assert not {"d0", "d1"} & {document.id for document in read(tmp_path, "test").documents}
    assert [question.id for question in first_documents(read(tmp_path), 3).questions] == ["a"]
    lines(tmp_path / "test.jsonl", [of_several("b", 2, 1)])
    with pytest.raises(DataError, match=r"document 'd1' is asked about in .*train\.jsonl and in .*test\.jsonl"):
        read(tmp_path)


def test_one_id_and_a_cell_of_csv_name_further_documents(tmp_path: Path) -> None:
    lines(tmp_path / "documents.jsonl", [{"id": number, "text": f"Text {number}."} for number in range(3)])
    (tmp_path / "questions.csv").write_text(
        'question,answers,document_id,further_document_ids\nWho?,Ada,0,"[1, 2]"\nWhere?,Lund,0,2\nWhen?,May,0,\n'
    )
    assert [question.further_ids for question in read(tmp_path).questions] == [("1", "2"), ("2",), ()]


def test_questions_whose_documents_are_drawn_apart_are_left_out_and_counted(tmp_path: Path) -> None:
    texts = [{"id": f"d{number}", "text": f"Text {number}."} for number in range(200)]
    lines(tmp_path / "documents.jsonl", texts)
    pairs = [of_several(f"{first}-{second}", first, second) for second in range(200) for first in range(0, second, 10)]
    lines(tmp_path / "questions.jsonl", pairs)
    splits = [read(tmp_path, split) for split in ("train", "val", "test")]
    for data in splits:
        ids = {document.id for document in data.documents}
        assert all(ids.issuperset((question.gold, *question.further_ids)) for question in data.questions)
    kept = sum(len(data.questions) for data in splits)
    assert 0 < kept < len(pairs)
    assert len(read(tmp_path).questions) == len(pairs)
    note = f"{len(pairs) - kept:,} questions are left out, because their documents are in different splits"
    assert all(any(note in each for each in data.notes) for data in splits)
    lines(tmp_path / "documents.jsonl", [{**text, "title": "One"} for text in texts])
    of_all = read(tmp_path, drawn_split(Document("", "", {"title": "One"})))
    assert len(of_all.questions) == len(pairs)
    assert not any("left out" in each for each in of_all.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"further_document_ids": ["d9"]}, "field 'further_document_ids': there is no document 'd9'"),
        ({"further_document_ids": [True]}, "field 'further_document_ids': it must be a text, got True"),
        ({"further_document_ids": ["d0"]}, "field 'further_document_ids': name each document once"),
        ({"further_document_ids": ["d1", "d1"]}, "field 'further_document_ids': name each document once"),
        ({"document_id": None}, "field 'document_id': it is missing or empty; name the document with the answer"),
    ],
)
def test_further_documents_that_cannot_be_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    lines(tmp_path / "documents.jsonl", [{"id": f"d{number}", "text": f"Text {number}."} for number in range(2)])
    lines(tmp_path / "questions.jsonl", [{**of_several("q", 0, 1), **change}])
    with pytest.raises(DataError, match=message):
        read(tmp_path)
    with pytest.raises(
        DataError, match="field 'further_document_ids': a row with the text of its document cannot name"
    ):
        read(lines(tmp_path / "rows.jsonl", [{**rows()[0], "further_document_ids": ["d1"]}]))


def test_a_split_without_questions_tells_where_they_are(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", rows(title="One"))
    for document in read(path).documents:
        own = drawn_split(document)
    other = "val" if own == "test" else "test"
    with pytest.raises(DataError, match=f"split '{other}' of .* holds no questions: of all 3, .*3 are in {own}"):
        read(path, other)
