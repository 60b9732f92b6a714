"""RealTimeQA: weeks of questions and of what was found for them become one stream in the order of its dates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mac_rag.data import load_dataset
from mac_rag.data.realtimeqa import read_realtimeqa
from mac_rag.data.types import Question
from mac_rag.errors import DataError

JUNE = {
    "question_id": "20230609_0",
    "question_date": "2023/06/08",
    "question_source": "CNN",
    "question_url": "https://example.org/quiz",
    "question_sentence": "Which town opened a museum of coins this week?",
    "choices": ["Lund", "Orsena", "Kell", "The town of Orsena"],
    "answer": ["3", "1"],
    "evidence": 'Ada Voss opened a <a href="https://example.org/a">museum</a> in Orsena &amp; spoke.',
}
MAY = {**JUNE, "question_id": "20230526_0", "question_date": "2023/05/26", "evidence": "", "answer": ["0"]}
ARTICLE = {
    "url": "https://example.org/lund",
    "title": "Lund ...",
    "text": "The museum of Lund was opened.\n\nIt holds coins.",
    "authors": [],
    "publish_date": "2023/05/24",
}
PASSAGE = {"doc_id": "627", "text": "Kell / Kell is a town.", "doc_score": "86.4", "publish_date": "2018/12/31"}


def write(file: Path, *rows: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def search(question: dict[str, Any], *results: Any) -> dict[str, Any]:
    return {"question_id": question["question_id"], "search_time": "2023/05/27/05:11", "search_result": list(results)}


@pytest.fixture
def weeks(tmp_path: Path) -> Path:
    """Two weeks of one year: in June a question with evidence, in May one with search results."""
    write(tmp_path / "past" / "2023" / "20230609_qa.jsonl", JUNE)
    write(tmp_path / "past" / "2023" / "20230609_qa_nota.jsonl", {"not": "read"})
    write(tmp_path / "past" / "2023" / "20230526_qa.jsonl", MAY)
    undated = {**ARTICLE, "url": "https://example.org/other", "publish_date": None}
    empty = {**ARTICLE, "url": "https://example.org/empty", "text": " "}
    write(tmp_path / "past" / "2023" / "20230526_gcs.jsonl", search(MAY, ARTICLE, undated, empty))
    write(tmp_path / "past" / "2023" / "20230526_dpr.jsonl", search(MAY, PASSAGE))
    return tmp_path


def test_questions_are_asked_as_of_their_day(weeks: Path) -> None:
    dataset = load_dataset("realtimeqa", "test", weeks)
    text = JUNE["question_sentence"]
    assert dataset.questions == (
        Question("20230526_0", text, ("Lund",), None, "2023-05-26"),
        Question("20230609_0", text, ("Orsena", "The town of Orsena"), "20230609_0-evidence", "2023-06-08"),
    )
    [note] = dataset.notes
    assert note.startswith("1 of 2 weeks have no search results (_gcs.jsonl, _dpr.jsonl)")


def test_the_stream_is_everything_that_was_found_in_the_order_of_its_dates(weeks: Path) -> None:
    dataset = read_realtimeqa(weeks)
    text = "Lund ...\nThe museum of Lund was opened.\n\nIt holds coins."
    assert [
        (document.id.split("#")[0], document.text, document.metadata["date"]) for document in dataset.documents
    ] == [
        ("627", "Kell / Kell is a town.", "2018-12-31"),
        ("https://example.org/lund", text, "2023-05-24"),
        ("https://example.org/other", text, "2023-05-27"),  # the day of the search
        ("20230609_0-evidence", "Ada Voss opened a museum in Orsena & spoke.", "2023-06-08"),
    ]


def test_a_week_can_be_named_by_its_file(weeks: Path) -> None:
    dataset = read_realtimeqa(weeks / "past" / "2023" / "20230526_qa.jsonl")
    assert [question.id for question in dataset.questions] == ["20230526_0"]
    assert len(dataset.documents) == 3


def test_a_page_with_two_texts_is_two_documents_and_one_text_has_its_first_date(tmp_path: Path) -> None:
    later, other = {**ARTICLE, "publish_date": "2023/06/01"}, {**ARTICLE, "text": "It closed."}
    write(tmp_path / "20230526_qa.jsonl", MAY)
    write(tmp_path / "20230526_gcs.jsonl", search(MAY, later, ARTICLE, later, other))
    documents = read_realtimeqa(tmp_path).documents
    assert len({document.id for document in documents}) == len(documents) == 2
    assert {document.metadata["date"] for document in documents} == {"2023-05-24"}


def test_questions_that_nothing_answers_are_left_out_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "20230526_qa.jsonl", JUNE, MAY, {**JUNE, "question_id": "q", "answer": []})
    dataset = read_realtimeqa(tmp_path)
    assert [question.id for question in dataset.questions] == ["20230609_0"]
    assert dataset.notes[:2] == (
        "1 questions are left out, because they name no right choice",
        "1 questions are left out, because they have neither evidence nor search results",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"question_id": 7}, "question_id must be a text, got 7"),
        ({"question_date": "2023/13/01"}, "question_date must be a day such as 2023/01/05, got '2023/13/01'"),
        ({"question_date": "last week"}, "question_date must be a day such as 2023/01/05, got 'last week'"),
        ({"question_sentence": " "}, "question_sentence must be a text, got ' '"),
        ({"choices": "Lund"}, "choices must be a list of texts, got 'Lund'"),
        ({"answer": ["4"]}, "answer names choice '4', but there are 4, from 0 on"),
        ({"answer": ["-1"]}, "answer names choice '-1', but there are 4, from 0 on"),
        ({"answer": [True]}, "answer names choice 'True'"),
        ({"answer": 3}, "answer must be a list of numbers of choices, got 3"),
        ({"evidence": ["x"]}, "evidence must be a text, got ['x']"),
        ({"evidence": "a\0b"}, "the character at index 1 is NUL"),
    ],
)
def test_a_malformed_question_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path / "20230609_qa.jsonl", {**JUNE, "question_id": "first"}, {**JUNE, **changes})
    with pytest.raises(DataError, match=r"20230609_qa\.jsonl, row 2: ") as error:
        read_realtimeqa(tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({}, "search_result must be a list, got {}"),
        (["x"], "search result 1: it must be an object, got 'x'"),
        ([{**ARTICLE, "text": 7}], "search result 1: title and text must be texts"),
        ([{**ARTICLE, "url": None}], "search result 1: it has neither a url nor a doc_id"),
        ([ARTICLE, {**ARTICLE, "publish_date": "soon"}], "search result 2: publish_date must be a day"),
    ],
)
def test_a_malformed_search_result_is_named(tmp_path: Path, results: Any, message: str) -> None:
    write(tmp_path / "20230526_qa.jsonl", MAY)
    write(tmp_path / "20230526_gcs.jsonl", {**search(MAY), "search_result": results})
    with pytest.raises(DataError, match=r"20230526_gcs\.jsonl, row 1") as error:
        read_realtimeqa(tmp_path)
    assert message in str(error.value)


def test_what_single_public_files_have_is_read(tmp_path: Path) -> None:
    """An answer that is no list, rows that come twice, and a row of nothing but its names."""
    blank = {**JUNE, "question_id": "x", "question_sentence": "", "choices": ["", ""], "answer": [], "evidence": ""}
    write(tmp_path / "20230609_qa.jsonl", {**JUNE, "answer": "1"}, {**JUNE, "answer": "1"}, blank)
    dataset = read_realtimeqa(tmp_path)
    assert [(question.id, question.answers) for question in dataset.questions] == [("20230609_0", ("Orsena",))]
    assert dataset.notes[0] == "1 questions are left out, because they name no right choice"


def test_two_questions_of_one_id_are_told_apart_by_their_weeks(tmp_path: Path) -> None:
    """As in one of the public files; in the same week nothing tells them apart."""
    write(tmp_path / "20230609_qa.jsonl", JUNE)
    write(tmp_path / "20230616_qa.jsonl", {**JUNE, "answer": ["0"]})
    dataset = read_realtimeqa(tmp_path)
    assert [question.id for question in dataset.questions] == ["20230609_0", "20230616:20230609_0"]
    assert {question.document_id for question in dataset.questions} == {document.id for document in dataset.documents}
    write(tmp_path / "20230616_qa.jsonl", {**JUNE, "answer": ["0"]}, {**JUNE, "answer": ["2"]})
    with pytest.raises(
        DataError, match=r"20230616_qa\.jsonl, row 2: '20230609_0' is the id of another question in this"
    ):
        read_realtimeqa(tmp_path)


def test_other_places_say_where_the_files_are(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "20230609_qa_nota.jsonl"):
        with pytest.raises(DataError, match=r"in past/ and backnumber/ of https://github\.com/realtimeqa"):
            read_realtimeqa(path)
        write(tmp_path / "20230609_qa_nota.jsonl", JUNE)
