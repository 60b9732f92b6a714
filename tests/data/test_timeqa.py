"""Time-Sensitive QA: paragraphs become dated documents, and questions are asked as of the time that they name."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mac_rag.data import load_dataset
from mac_rag.data.dates import read_date
from mac_rag.data.timeqa import asked_as_of, paragraph_dates, read_timeqa
from mac_rag.data.types import Question
from mac_rag.errors import DataError

PAGE = {
    "index": "/wiki/Tom_Webb#P54",
    "type": "P54",
    "link": "/wiki/Tom_Webb",
    "paras": [
        "Tom Webb",
        "Career .",
        "Webb played for Lund FC from 1996 to 2003 , with 1,250 fans .",
        "He scored often .",
        "In 2003 he moved to Kell United .",
    ],
    "questions": [
        [
            "Which team did Webb , born in 1970 , play for from 1996 to Feb 2003 ?",
            [
                {"para": 2, "from": 16, "end": 23, "answer": "Lund FC"},
                {"para": 4, "from": 0, "end": 4, "answer": "Lund"},
            ],
        ],
        ["Which team did he play for in 2004?", [{"para": 4, "from": 20, "end": 31, "answer": "Kell United"}]],
        ["Which team did he play for in 1980?", [{"para": 0, "from": 0, "end": 0, "answer": ""}]],
    ],
}


def write(folder: Path, *pages: Any, name: str = "human_annotated_test.json") -> Path:
    (folder / name).write_text(json.dumps(pages))
    return folder


def page(link: str, **changes: Any) -> dict[str, Any]:
    return {**PAGE, "index": f"{link}#P54", "link": link, **changes}


def test_paragraphs_are_documents_with_their_title_in_front_and_a_date(tmp_path: Path) -> None:
    dataset = load_dataset("timeqa", "test", write(tmp_path, PAGE))
    assert [document.id for document in dataset.documents] == [f"Tom_Webb#{number}" for number in range(5)]
    assert [document.text for document in dataset.documents][:2] == ["Tom Webb", "Tom Webb. Career ."]
    assert [document.metadata["date"] for document in dataset.documents] == ["1996", "1996", "1996", "1996", "2003"]
    assert all(document.date == read_date(document.metadata["date"]) for document in dataset.documents)


def test_questions_have_the_paragraph_and_moment_of_their_answer(tmp_path: Path) -> None:
    dataset = read_timeqa(write(tmp_path, PAGE), "test")
    text = "Which team did Webb , born in 1970 , play for from 1996 to Feb 2003 ?"
    assert dataset.questions == (
        Question("/wiki/Tom_Webb#P54-1", text, ("Lund", "Lund FC"), "Tom_Webb#2", "2003-02-28"),
        Question(
            "/wiki/Tom_Webb#P54-2", "Which team did he play for in 2004?", ("Kell United",), "Tom_Webb#4", "2004-12-31"
        ),
    )
    [note] = dataset.notes
    assert note.endswith("human_annotated_test.json: 1 questions are left out, because their pages do not answer them")


@pytest.mark.parametrize(
    ("question", "moment"),
    [
        ("From Nov 2016 to Mar 2018, who took the role of head coach?", "2018-03-31"),
        ("Who lived in the tower built between 1772 and 1774 in Mannheim from 1774 to 1783?", "1783-12-31"),
        ("In 1994 the Rams left. What stadium did they play in from 1995 to 2015?", "2015-12-31"),
        ("In dec 1981, who became the host?", "1981-12-31"),
        ("Who was elected mayor 1990?", "1990-12-31"),
        ("Who was the host, born in 1970, from late 1990 to early 1992?", "1992-12-31"),
        ("In 2001, who was the host from late May 1990 to early Sept 1992?", "1992-09-30"),
        ("Who was the host between June 1990 and Sept. 1992?", "1992-09-30"),
        ("Who was the host in february 1984?", "1984-02-29"),
        ("In 1994 and then in 1999, who won?", "1999-12-31"),
        ("From 880 to 887, what was his title?", None),
        ("From 1998 to 200, which team did he coach?", None),
        ("Who was her second spouse?", None),
        ("Who commanded U-1234567 with 1,250 men?", None),
    ],
)
def test_a_question_is_asked_at_the_end_of_the_last_time_that_it_names(question: str, moment: str | None) -> None:
    assert asked_as_of(question) == moment


@given(st.lists(st.lists(st.integers(1000, 2029), max_size=3), max_size=8))
def test_a_paragraph_has_its_first_year_or_that_of_the_one_before(years: list[list[int]]) -> None:
    dates = paragraph_dates([" ".join(["He", *(f"in {year}" for year in some), "."]) for some in years])
    every = [year for some in years for year in some]
    last = f"{min(every)}" if every else "0001-01-01"
    for some, date in zip(years, dates, strict=True):
        last = str(min(some)) if some else last
        assert date == last
        read_date(date)


def test_val_and_train_divide_the_pages_of_the_training_file(tmp_path: Path) -> None:
    pages = [page(f"/wiki/Page_{number}") for number in range(60)]
    pages.append(page("/wiki/Page_7", index="/wiki/Page_7#P6"))  # a page with questions of two kinds
    packed = gzip.compress(json.dumps(pages).encode())
    (tmp_path / "human_annotated_train.json.gz").write_bytes(packed)
    train, val = read_timeqa(tmp_path, "train"), read_timeqa(tmp_path, "val")
    for part in (train, val):
        assert {question.document_id for question in part.questions} <= {document.id for document in part.documents}
    names = [{document.id.split("#")[0] for document in part.documents} for part in (train, val)]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == 60
    assert 1 <= len(names[1]) <= 15
    assert len(train.questions) + len(val.questions) == 61 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paras": []}, "page 1: the first paragraph must be the page's title"),
        ({"paras": ["Tom Webb", 7]}, "page 1: paras must be a list of texts"),
        ({"paras": ["Tom Webb", "a\0b", "c", "d", "e"]}, "page 1, paragraph 1: the character at index 11 is NUL"),
        ({"link": None}, "page 1: link must be a text, got None"),
        ({"questions": {}}, "page 1: questions must be a list"),
        ({"questions": [["Who?"]]}, "page 1, question 1: it must be a text and a list of answers"),
        ({"questions": [["Who?", ["Ada"]]]}, "page 1, question 1: an answer must be an object"),
        ({"questions": [["Who?", [{"para": 5, "answer": "Ada"}]]]}, "para must be the number of one of 5 paragraphs"),
        ({"questions": [["Who?", [{"para": True, "answer": "Ada"}]]]}, "para must be the number"),
        ({"questions": [[" ", [{"para": 1, "answer": "Ada"}]]]}, "question 1: a text must not be empty"),
    ],
)
def test_a_malformed_page_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=r"human_annotated_test\.json, page 1") as error:
        read_timeqa(write(tmp_path, {**PAGE, **changes}), "test")
    assert message in str(error.value)


def test_two_texts_of_one_paragraph_are_refused(tmp_path: Path) -> None:
    other = {**PAGE, "paras": [*PAGE["paras"][:4], "Another text ."]}
    with pytest.raises(DataError, match="page 2: paragraph 'Tom_Webb#4' has another text on an earlier page"):
        read_timeqa(write(tmp_path, PAGE, other), "test")


@pytest.mark.parametrize("content", [b"{", b"{}", b"\0", b"[1]"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "human_annotated_test.json").write_bytes(content)
    with pytest.raises(DataError, match=r"human_annotated_test\.json"):
        read_timeqa(tmp_path, "test")


def test_a_missing_file_says_where_it_is_found(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"human_annotated_train\.json\.gz; the files are in dataset/ of https://github"
    ):
        read_timeqa(tmp_path, "train")
