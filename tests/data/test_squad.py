"""SQuAD-Seq: the official layout, plain and gzipped, the paper's row ranges, and files of another kind refused."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from mac_rag.data.squad import (
    PARTS,
    SplitRange,
    SquadRow,
    read_official,
    read_squad,
    select_rows,
)
from mac_rag.errors import DataError

WHOLE = SplitRange("small.json", 0, 4, 4)


def layout(*articles: tuple[str, list[tuple[str, list[tuple[str, list[str]]]]]]) -> dict[str, Any]:
    """The official layout of (title, [(paragraph, [(question, answers)])])."""
    number = itertools.count()

    def question(text: str, answers: list[str]) -> dict[str, Any]:
        spans = [{"text": answer, "answer_start": 0} for answer in answers]
        return {"id": f"q{next(number)}", "question": text, "answers": spans}

    def paragraph(text: str, questions: list[tuple[str, list[str]]]) -> dict[str, Any]:
        return {"context": text, "qas": [question(*each) for each in questions]}

    data = [{"title": title, "paragraphs": [paragraph(*each) for each in some]} for title, some in articles]
    return {"version": "1.1", "data": data}


SMALL = layout(
    ("Super Bowl/50", [("A b c.", [("q0?", ["the b", "b", "b", " c "])]), ("D.", [("q1?", ["D"])])]),
    ("../etc", [("E.", [(" q2? ", ["E"])]), ("E.", [("q3?", ["E"])])]),
)


def small_rows(tmp_path: Path, content: Any = SMALL) -> list[SquadRow]:
    file = tmp_path / "small.json"
    file.write_text(json.dumps(content))
    return list(read_official(file))


def test_paragraphs_are_documents_in_article_order(tmp_path: Path) -> None:
    dataset = select_rows(small_rows(tmp_path), WHOLE, "test", "small.json")
    assert [(d.text, d.metadata["title"]) for d in dataset.documents] == [
        ("A b c.", "Super Bowl/50"),
        ("D.", "Super Bowl/50"),
        ("E.", "../etc"),
    ]
    assert [document.id for document in dataset.documents] == ["Super_Bowl_50-000", "Super_Bowl_50-001", ".._etc-000"]
    assert [(q.id, q.question, q.document_id) for q in dataset.questions] == [
        ("q0", "q0?", "Super_Bowl_50-000"),
        ("q1", "q1?", "Super_Bowl_50-001"),
        ("q2", "q2?", ".._etc-000"),
        ("q3", "q3?", ".._etc-000"),
    ]
    assert dataset.questions[0].answers == ("b", "the b", "c")  # the shortest first, each once


def test_titles_that_differ_only_in_signs_keep_their_documents_apart() -> None:
    rows = [SquadRow(title, "Text.", title, "q?", ("Text",)) for title in ("A b", "A/b", "A_b", "A-b")]
    dataset = select_rows(rows, WHOLE, "test", "rows")
    assert [document.id for document in dataset.documents] == ["A_b-000", "A_b-001", "A_b-002", "A-b-000"]


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of SQuAD's sizes: one plain and one gzipped, a paragraph for every ten questions."""
    folder = tmp_path_factory.mktemp("squad")
    for name, size in (("train-v1.1.json", 87_599), ("dev-v1.1.json", 10_570)):
        paragraphs = [
            (f"Text {first}.", [(f"q{n}?", ["a"]) for n in range(first, min(first + 10, size))])
            for first in range(0, size, 10)
        ]
        content = json.dumps(layout(("Title", paragraphs)))
        if name.startswith("dev"):
            (folder / f"{name}.gz").write_bytes(gzip.compress(content.encode(), 1))
        else:
            (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize(
    ("split", "file", "first", "count"),
    [
        ("qa_lt", "train-v1.1.json", 0, 40_006),
        ("qa_lt_val", "train-v1.1.json", 40_006, 2_112),
        ("train", "train-v1.1.json", 42_118, 39_893),
        ("val", "train-v1.1.json", 82_011, 5_588),
        ("test", "dev-v1.1.json", 0, 10_570),
    ],
)
def test_the_splits_are_the_papers(split: str, file: str, first: int, count: int) -> None:
    size = {"train-v1.1.json": 87_599, "dev-v1.1.json": 10_570}[file]
    rows = (SquadRow("Title", f"Text {n // 10 * 10}.", f"{n}", f"q{n}?", ("a",)) for n in range(size))
    dataset = select_rows(list(rows), PARTS[split], split, file)
    assert (dataset.name, dataset.split, len(dataset.questions)) == ("squad", split, count)
    assert dataset.questions[0].question == f"q{first}?"
    assert dataset.questions[-1].question == f"q{first + count - 1}?"


@pytest.mark.parametrize(("split", "first"), [("val", 82_011), ("test", 0)])
def test_a_split_is_read_from_the_plain_or_the_gzipped_file(full_size: Path, split: str, first: int) -> None:
    assert read_squad(full_size, split).questions[0].question == f"q{first}?"


def test_a_file_of_another_size_is_refused(full_size: Path) -> None:
    file = full_size / "dev-v1.1.json.gz"
    with pytest.raises(DataError, match=r"dev-v1.1.json.gz has 10,570 questions, not the 87,599 .* split 'train'"):
        read_squad(file, "train")
    assert len(read_squad(file, "test").questions) == 10_570


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no .*dev-v1.1.json or .*dev-v1.1.json.gz"):
        read_squad(tmp_path, "test")


PACKED = gzip.compress(json.dumps(SMALL).encode())


@pytest.mark.parametrize(
    ("content", "ending"),
    [
        *((content, "") for content in (b"", b"{", b"[1]", b'{"version": "2"}', b"\xff\xfe\x00", b"[" * 100_000)),
        *((content, ".gz") for content in (PACKED[:40], PACKED[10:])),
    ],
    ids=["empty", "cut", "list", "no data", "no text", "deep", "packed and cut", "without a header"],
)
def test_what_is_not_squad_is_refused(tmp_path: Path, content: bytes, ending: str) -> None:
    (tmp_path / f"dev-v1.1.json{ending}").write_bytes(content)
    with pytest.raises(DataError, match=f"dev-v1.1.json{ending} is not a SQuAD file"):
        read_squad(tmp_path, "test")


def test_a_question_without_answers_is_named(tmp_path: Path) -> None:
    content = {"data": [{"title": "A", "paragraphs": [{"context": "A.", "qas": [{"question": "q?"}]}]}]}
    with pytest.raises(DataError, match="article 1, paragraph 1, question 1, field 'answers'"):
        small_rows(tmp_path, content)


@pytest.mark.parametrize(
    ("context", "question", "answers"),
    [(" ", "q?", ["a"]), ("Text.", "", ["a"]), ("Text.", "q?", []), ("Text.", "q?", [" "])],
)
def test_an_empty_text_or_answer_is_named(tmp_path: Path, context: str, question: str, answers: list[str]) -> None:
    rows = small_rows(tmp_path, layout(("A", [("Text.", [("q?", ["a"])]), (context, [(question, answers)])])))
    with pytest.raises(DataError, match=r"small.json, row 1 \('q1'\): paragraph, question or every answer is empty"):
        select_rows(rows, SplitRange("small.json", 0, 2, 2), "test", "small.json")
