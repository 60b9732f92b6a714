"""StreamingQA: texts become documents once, the shortest answer comes first, malformed rows are named."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from mac_rag.data import load_dataset
from mac_rag.data import streamingqa as released
from mac_rag.data.archivalqa import STREAMINGQA_SPLITS, read_streamingqa
from mac_rag.data.streamingqa import PARTS, SplitRange
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


def article(date: str, text: str) -> tuple[bytes, str]:
    """A line of the WMT News Crawl, and the id by which StreamingQA names it."""
    whole = base64.b64encode(text.replace("\n", " ").encode())
    line = b"\t".join([date.encode(), base64.b64encode(text.encode()), whole]) + b"\n"
    return line, f"{date}{'0' * 12}\0\1{hashlib.sha256(whole).hexdigest()}\0\1"


def write_release(folder: Path, lines: list[bytes], *rows: dict[str, Any], file: str = PARTS["test"].file) -> Path:
    """Writes articles and one file of questions as they are released."""
    (folder / "news-docs.2020.en.filtered.gz").write_bytes(gzip.compress(b"".join(lines)))
    content = "".join(json.dumps({"qa_id": "eval-0", "question_ts": 1, **row}) + "\n" for row in rows)
    (folder / file).write_bytes(gzip.compress(content.encode()))
    return folder


STORM, STORM_ID = article("20200131", "A storm has hit Haib.\nIt lasted a day.")
OTHER, OTHER_ID = article("20200201", "Nothing happened.")
ASKED = {"question": "What has hit Haib? ", "answers": ["a heavy storm", "a storm", "storm"], "evidence_id": STORM_ID}


class TestReleased:
    def test_questions_are_read_with_their_articles(self, tmp_path: Path) -> None:
        again = {**ASKED, "question": "Where was the storm?", "answers": ["Haib"]}
        dataset = load_dataset("streamingqa", "test", write_release(tmp_path, [OTHER, STORM], ASKED, again))
        [document] = dataset.documents
        assert (document.text, document.metadata["date"]) == ("A storm has hit Haib.\nIt lasted a day.", "2020-01-31")
        assert [question.question for question in dataset.questions] == ["What has hit Haib?", "Where was the storm?"]
        assert dataset.questions[0].answers == ("storm", "a heavy storm", "a storm")
        assert {question.document_id for question in dataset.questions} == {document.id}
        assert "rows 1 to 5,000 of streaminqa_eval.jsonl.gz" in dataset.notes[0]

    def test_a_question_without_its_article_is_left_out_and_counted(self, tmp_path: Path) -> None:
        dataset = read_streamingqa(write_release(tmp_path, [STORM], ASKED, {**ASKED, "evidence_id": OTHER_ID}), "test")
        assert len(dataset.questions) == 1
        assert dataset.notes[1].startswith("1 of 2 questions are left out")
        with pytest.raises(DataError, match=r"holds none of the articles .* news-docs\.<year>"):
            read_streamingqa(write_release(tmp_path, [OTHER], ASKED), "test")

    def test_a_split_is_a_range_of_rows(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(released.PARTS, "test", SplitRange(PARTS["test"].file, 1, 3))
        rows = [{**ASKED, "question": f"What is {number}?"} for number in range(5)]
        dataset = read_streamingqa(write_release(tmp_path, [STORM], *rows), "test")
        assert [question.question for question in dataset.questions] == ["What is 1?", "What is 2?"]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"answers": []}, "line 2: not a question of StreamingQA"),
            ({"evidence_id": "2020"}, "line 2: not a question of StreamingQA"),
            ({"question": 5}, "line 2: not a question of StreamingQA"),
        ],
    )
    def test_a_malformed_row_is_named(self, tmp_path: Path, change: dict[str, Any], message: str) -> None:
        with pytest.raises(DataError, match=message):
            read_streamingqa(write_release(tmp_path, [STORM], ASKED, {**ASKED, **change}), "test")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"no gzip", "cannot be read"),
            (gzip.compress(STORM)[:-9], "cannot be read"),
            (gzip.compress(b"20200131\tonly one field\n"), "line 1: it has 2 fields, not 3"),
        ],
        ids=["not zipped", "cut off", "a field too few"],
    )
    def test_a_damaged_file_of_articles_is_named(self, tmp_path: Path, content: bytes, message: str) -> None:
        write_release(tmp_path, [STORM], ASKED)
        (tmp_path / "news-docs.2020.en.filtered.gz").write_bytes(content)
        with pytest.raises(DataError, match=f"news-docs.2020.*{message}"):
            read_streamingqa(tmp_path, "test")
