"""A user's own data: every form gives the same documents and questions, splits do not move, errors name the place."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mac_rag.data import load_dataset
from mac_rag.data.own import find_files
from mac_rag.data.types import Document
from mac_rag.errors import ConfigError, DataError
from tests.data.helpers import (
    ASKED,
    QUESTIONS,
    TEXTS,
    asked,
    documents_and_questions,
    flash_rag,
    json_lines,
    lines,
    read,
    rows,
)


def squad(folder: Path) -> Path:
    paragraphs = [
        {
            "context": text,
            "qas": [
                {"id": n, "question": q, "answers": [{"text": a, "answer_start": 0} for a in answers]}
                for n, q, answers, i in QUESTIONS
                if i == place
            ],
        }
        for place, text in enumerate(TEXTS)
    ]
    file = folder / "mine.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"data": [{"paragraphs": paragraphs}], "version": 2}).encode()))
    return file


def comma_separated(folder: Path) -> Path:
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["q", "a", "context"])
        # One answer is written as it is, several as a list in JSON.
        writer.writerows([q, json.dumps(a) if len(a) > 1 else a[0], TEXTS[i]] for _, q, a, i in QUESTIONS)
    return folder / "rows.csv"


def parquet(folder: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(
        [{"q": q, "a": {"text": a, "answer_start": [0] * len(a)}, "context": TEXTS[i]} for _, q, a, i in QUESTIONS]
    )
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    return folder / "rows.parquet"


@pytest.mark.parametrize(
    ("write", "columns"),
    [
        (json_lines, {}),
        (documents_and_questions, {}),
        (flash_rag, {}),
        (squad, {}),
        (comma_separated, {"question": "q", "answers": "a"}),
        (parquet, {"question": "q", "answers": "a"}),
    ],
)
def test_every_form_holds_the_same(tmp_path: Path, write: Callable[[Path], Path], columns: dict[str, str]) -> None:
    data = read(write(tmp_path), columns=columns)
    wanted = [(question, set(answers), text) for question, answers, text in ASKED]
    if write is squad:  # in the order of the paragraphs
        wanted = [wanted[0], wanted[2], wanted[1]]
    assert asked(data) == wanted
    assert data.questions[0].answers[0] == "Voss"  # the shortest is the one to train on
    alone = {documents_and_questions, flash_rag, squad}
    assert [document.text for document in data.documents] == TEXTS[: 3 if write in alone else 2]


def test_a_split_of_the_hub_is_divided_and_splits_of_it_are_used_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    table = datasets.Dataset.from_list(
        [{key: row[key] for key in ("document", "question", "answers")} for row in rows()]
    )
    tables = {"train": table.select([0]), "validation": table.select([1]), "unsupervised": table}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split: tables if split is None else tables[split])
    assert [len(read("hub:some/own", split).questions) for split in ("train", "val", "all")] == [1, 1, 2]
    assert asked(read("hub:some/own", "val")) == [(ASKED[1][0], set(ASKED[1][1]), ASKED[1][2])]
    with pytest.raises(
        DataError, match="hub:some/own has the split train and val by the names of its files, and no test"
    ):
        read("hub:some/own", "test")
    assert len(read("hub:some/own:unsupervised").questions) == 3


def test_metadata_title_and_date_belong_to_the_document(tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", rows(title="News", date="2024-05-01", metadata={"page": 3}, level="hard"))
    assert {document.metadata["page"] for document in read(path).documents} == {3}
    assert read(path).documents[0].metadata == {"page": 3, "title": "News", "date": "2024-05-01"}
    documents_and_questions(tmp_path / "folder")
    assert read(tmp_path / "folder").documents[2] == Document("d2", TEXTS[2], {"n": 2})


def test_the_moment_belongs_to_the_question(tmp_path: Path) -> None:
    content = rows()
    for row, moment in zip(content, ("2004-05-31", 2004, None, "")):
        row["as_of"] = moment
    read_in = read(lines(tmp_path / "rows.jsonl", content))
    moments = [question.as_of for question in read_in.questions]
    assert moments == ["2004-05-31", "2004", *[None] * (len(moments) - 2)]
    assert all("as_of" not in document.metadata for document in read_in.documents)


def test_beside_a_file_of_documents_rows_name_documents_and_hold_none(tmp_path: Path) -> None:
    documents_and_questions(tmp_path)
    lines(tmp_path / "questions.jsonl", rows())
    with pytest.raises(DataError, match="row 1, field 'document': the documents are in a file of their own; name"):
        read(tmp_path)
    lines(tmp_path / "questions.jsonl", [{"question": "Who?", "answers": "Ada", "document_id": "d9"}])
    with pytest.raises(DataError, match="row 1, field 'document_id': there is no document 'd9'"):
        read(tmp_path)
    lines(tmp_path / "documents.jsonl", [{"id": "d0", "text": "A."}, {"id": "d0", "text": "B."}])
    with pytest.raises(DataError, match=r"documents\.jsonl, row 2, field 'id': 'd0' is the id of another document"):
        read(tmp_path)


def test_unanswerable_questions_are_left_out_and_counted(tmp_path: Path) -> None:
    qas = [
        {"id": "a", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 0}], "is_impossible": False},
        {"id": "b", "question": "Whom?", "answers": [], "is_impossible": True},
    ]
    file = tmp_path / "v2.json"
    file.write_text(json.dumps({"data": [{"title": "T", "paragraphs": [{"context": "Ada came.", "qas": qas}]}]}))
    data = read(file)
    assert [question.id for question in data.questions] == ["a"]
    assert data.notes == (f"{file}: 1 questions are left out, because they are marked as impossible to answer",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": None}, r"row 2, field 'answers': it is missing or empty; give a text or a list"),
        ({"answers": []}, r"row 2, field 'answers': it is missing or empty"),
        ({"answers": 42}, r"row 2, field 'answers': it must be a text or a list of texts, got 42"),
        ({"answers": ["a", 42]}, r"row 2, field 'answers': answer 2 must be a text, got 42; write numbers in quotes"),
        ({"answers": [" \t"]}, r"row 2, field 'answers': a text must not be empty"),
        ({"question": "\u200b"}, r"row 2, field 'question': a text must not be empty"),
        ({"question": 7}, r"row 2, field 'question': it must be a text, got 7"),
        ({"document": " "}, r"row 2, field 'document': a text must not be empty"),
        (
            {"document": None},
            r"row 2, field 'document': it is missing or empty; give the text .*\(the row has 'id', 'doc",
        ),
        ({"document": "half \ud83d"}, r"row 2, field 'document': the character at index 5 is U\+D83D"),
        ({"id": True}, r"row 2, field 'id': it must be a text, got True"),
        ({"id": "q0"}, r"row 2, field 'id': 'q0' is the id of another question in an earlier row"),
        ({"metadata": "x"}, r"row 2, field 'metadata': it must be an object"),
        ({"as_of": "03/04/2004"}, r"row 2, field 'as_of': the date '03/04/2004' can be read in several ways"),
        ({"as_of": True}, r"row 2, field 'as_of': True is no date"),
        ({"document_id": "d0"}, r"row 2, field 'document_id': 'd0' is the id of another text in an earlier row"),
        ({"document": TEXTS[0], "date": "2024"}, r"row 2, field 'date': document 'd0' has another one in an earlier"),
    ],
)
def test_a_malformed_row_is_named_with_its_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    content = rows()
    content[0]["document_id"] = "d0"
    content[1] |= change
    path = lines(tmp_path / "rows.jsonl", content)
    with pytest.raises(DataError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)


def test_an_error_never_quotes_a_whole_document(tmp_path: Path) -> None:
    for wrong in ({"document": "x\0" + "y" * 100_000}, {"document": ["y" * 100_000]}, {"answers": {"y" * 100_000: 1}}):
        path = lines(tmp_path / "rows.jsonl", [{**rows()[0], **wrong}])
        with pytest.raises(DataError) as error:
            read(path)
        assert len(str(error.value)) < 1_000


def test_a_row_of_csv_is_named_with_line_and_field(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('document,question,answers\n"A\ntext.",What?,text\nMore.,,more\n')
    with pytest.raises(DataError, match=r"rows\.csv, row 2 \(line 4\), field 'question': it is missing or empty"):
        read(tmp_path / "rows.csv")
    (tmp_path / "rows.csv").write_text("document,question\nA text.,What?\n")
    with pytest.raises(DataError, match=r"row 1 \(line 2\), field 'answers': it is missing or empty"):
        read(tmp_path / "rows.csv")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"data": [{"paragraphs": [{"context": "A.", "qas": [{"question": 1}]}]}]}',
            r"article 1, paragraph 1, question 1",
        ),
        ('{"data": [{"paragraphs": [{"qas": []}]}]}', r"article 1, paragraph 1, field 'context': it must be a text"),
        ('{"data": [{"paragraphs": {}}]}', r"article 1, field 'paragraphs': it must be a list; got \{\}"),
        ('{"data": [7]}', r"article 1: not a JSON object but int"),
        ('{"version": 2}', r"is not a SQuAD file .*field 'data': it must be a list; it has 'version'"),
        ("[]", r"is not a SQuAD file .*not a JSON object but list"),
        ('{"data": []', r"is not a SQuAD file .*not JSON .*column 12"),
        (
            '{"data": []} {}',
            r"is not a SQuAD file .*Extra data, column 14.*JSON Lines, .* in a file that ends in \.jsonl",
        ),
        ('{"data": [], "data": []}', r"'data' comes twice"),
        ('{"data": [{"a": NaN}]}', r"NaN is not JSON"),
    ],
)
def test_another_layout_than_squads_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "mine.json").write_text(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "mine.json")


def test_columns_are_checked(tmp_path: Path) -> None:
    path = json_lines(tmp_path)
    with pytest.raises(ConfigError, match="unknown field 'answer'; choose one of id, document, question, answers"):
        read(path, columns={"answer": "answers"})
    with pytest.raises(DataError, match=r"row 1: no column 'q', which .* for 'question'; choose one of 'id'"):
        read(path, columns={"question": "q"})
    with pytest.raises(ConfigError, match="columns are for data of your own; the files of squad have fixed names"):
        load_dataset("squad", "test", path, columns={"question": "q"})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], r"has no questions; give files named train, val and test, .*\(it has no such file\)"),
        (["rows.jsonl"], r"\(it has rows\.jsonl\)"),
        (["documents.jsonl"], "has no questions"),
        (["questions.jsonl"], r"holds questions\.jsonl without documents; put documents\.jsonl beside it"),
        (["documents.jsonl", "questions.jsonl", "train.jsonl"], "questions by splits; keep one of the two"),
        (["dev.jsonl", "val.csv"], r"holds the split val twice, in dev\.jsonl and val\.csv"),
        (["corpus.jsonl", "documents.jsonl", "test.jsonl"], "holds documents twice"),
    ],
)
def test_a_folder_of_no_form_is_named(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=message):
        find_files(tmp_path)


def test_a_path_that_is_no_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no .*nowhere; give a file, a folder"):
        read(tmp_path / "nowhere")
    (tmp_path / "rows.txt").touch()
    with pytest.raises(DataError, match=r"rows\.txt has an unknown ending; give a file that ends in \.jsonl, "):
        read(tmp_path / "rows.txt")
