"""StreamingQA: texts become documents once, the shortest answer comes first, malformed rows are named."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from mac_rag.data import load_dataset
from mac_rag.data.archivalqa import STREAMINGQA_SPLITS, read_streamingqa
from mac_rag.errors import DataError


def write(folder: Path, split: str, *rows: tuple[str, str, str]) -> None:
    with (folder / f"{split}.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("text", "question", "answers"), *rows])


def test_each_text_is_one_document_in_the_order_of_the_stream(tmp_path: Path) -> None:
    write(tmp_path, "test", ("Text B.", "q1?", "b"), ("Text A.", "q2?", "a"), ("Text B.", " q3? ", "b"))
    dataset = read_streamingqa(tmp_path, "test")
    assert (dataset.name, dataset.split) == ("streamingqa", "test")
    assert [document.text for document in dataset.documents] == ["Text B.", "Text A."]
    assert [question.question for question in dataset.questions] == ["q1?", "q2?", "q3?"]
    by_document = dataset.questions_by_document()
    assert [len(by_document[document.id]) for document in dataset.documents] == [2, 1]


def test_a_text_has_the_same_id_in_every_split_and_place(tmp_path: Path) -> None:
    write(tmp_path, "train", ("Text A.", "q?", "a"))
    write(tmp_path, "qa_train", ("Text B.", "q?", "a"), ("Text A.", "q?", "a"))
    assert read_streamingqa(tmp_path, "qa_train").documents[1] == read_streamingqa(tmp_path, "train").documents[0]


def test_the_shortest_answer_comes_first_and_the_others_are_kept_once(tmp_path: Path) -> None:
    write(tmp_path, "val", ("Text.", "q?", "forty two\\42\\ the 42 \\42\\\\XL"))
    assert read_streamingqa(tmp_path, "val").questions[0].answers == ("42", "forty two", "the 42", "XL")


def test_a_file_can_be_named_instead_of_its_folder(tmp_path: Path) -> None:
    write(tmp_path, "test", ("Text.", "q?", "a"))
    assert read_streamingqa(tmp_path / "test.csv", "test") == load_dataset("streamingqa", "test", tmp_path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((" ", "q?", "a"), "'text': the cell is empty"),
        (("Text.", "", "a"), "'question': the cell is empty"),
        (("Text.", "q?", ""), "'answers': the cell is empty"),
        (("Text.", "q?", "\\ \\"), "'answers': it holds separators but no answer"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, row: tuple[str, str, str], message: str) -> None:
    write(tmp_path, "test", ("Text.", "q?", "a"), row)
    with pytest.raises(DataError, match=rf"test.csv, row 2 \(line 3\), column {message}"):
        read_streamingqa(tmp_path, "test")


@pytest.mark.parametrize("split", STREAMINGQA_SPLITS)
def test_a_split_is_the_file_of_its_name(tmp_path: Path, split: str) -> None:
    with pytest.raises(DataError, match=f"{split}.csv cannot be read"):
        read_streamingqa(tmp_path, split)
