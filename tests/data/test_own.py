"""A user's own data: every form gives the same documents and questions, splits do not move, errors name the place."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mac_rag.data import load_dataset
from mac_rag.data.own import drawn_split, find_files
from mac_rag.data.table import parsed_cell
from mac_rag.data.types import Document, QADataset, first_documents
from mac_rag.errors import ConfigError, DataError

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


@pytest.mark.parametrize(
    "cell",
    [
        "['Ada Voss', 'Voss']",
        '["Ada Voss", "Voss"]',
        "('Ada Voss', 'Voss')",
        "{'Ada Voss', 'Voss'}",
        "['Ada Voss' 'Voss']",  # as numpy prints
        "['Ada Voss'\n 'Voss']",
        "array(['Ada Voss', 'Voss'], dtype=object)",
        "{'text': array(['Ada Voss', 'Voss'], dtype=object), 'answer_start': array([0, 4])}",  # SQuAD by pandas
        "{'text': ['Ada Voss', 'Voss'], 'answer_start': [0, 4]}",
        " [u'Ada Voss', \"Voss\"] ",
    ],
)
@pytest.mark.parametrize("name", ["rows.csv", "ROWS.TSV"])
def test_a_cell_may_hold_a_list(tmp_path: Path, cell: str, name: str) -> None:
    with (tmp_path / name).open("w", newline="") as file:
        rows = csv.writer(file, delimiter="\t" if name.endswith("TSV") else ",")
        rows.writerows([("document", "question", "answers"), (TEXTS[0], "Who?", cell)])
    [question] = read(tmp_path / name).questions
    assert set(question.answers) == {"Ada Voss", "Voss"}


@pytest.mark.parametrize("cell", ["[sic]", "(see above)", "[Ada] Voss", '"Ada" Voss', "{Ada}", "('Ada')"])
def test_a_text_in_brackets_is_a_text(tmp_path: Path, cell: str) -> None:
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("document", "question", "answers"), (TEXTS[0], "Who?", cell)])
    [question] = read(tmp_path / "rows.csv").questions
    assert question.answers == (cell,)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("['it's']", "is no list that can be read"),
        ("['Ada' 'Voss' ... 'Zak']", "is no list that can be read"),
        ("['Ada', 'Vo", "is no list that can be read"),
        ("['a', __import__('os')]", "is no list that can be read"),
        ("['a'," + "1," * 600_000 + "]", "is no list that can be read"),
        ("['Ada', nan]", "answer 2 must be a text, got None"),
        ("[180]", "answer 1 must be a text, got 180"),
        ("[]", "it is missing or empty"),
    ],
)
def test_a_cell_with_a_list_that_cannot_be_read_is_named(tmp_path: Path, cell: str, message: str) -> None:
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("document", "question", "answers"), (TEXTS[0], "Who?", cell)])
    with pytest.raises(DataError, match=rf"row 1 \(line 2\), field 'answers': .*{message}") as error:
        read(tmp_path / "rows.csv")
    assert len(str(error.value)) < 500


@given(st.lists(st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1), min_size=1), st.booleans())
def test_any_list_of_texts_is_read_back(texts: list[str], as_python: bool) -> None:
    assert parsed_cell(repr(texts) if as_python else json.dumps(texts)) == texts


@pytest.mark.parametrize(("mark", "kept"), [("True", 0), ("false", 1), ("1", 0), ("", 1)])
def test_a_cell_marks_a_question_as_impossible(tmp_path: Path, mark: str, kept: int) -> None:
    content = f"document,question,answers,is_impossible\n{TEXTS[0]},Who?,Ada,{mark}\n{TEXTS[1]},What?,A ferry,False\n"
    (tmp_path / "rows.csv").write_text(content)
    assert len(read(tmp_path / "rows.csv").questions) == kept + 1
    (tmp_path / "rows.csv").write_text(content.replace("False", "perhaps"))
    with pytest.raises(DataError, match=r"row 2 .*'is_impossible': it must be true or false, got 'perhaps'"):
        read(tmp_path / "rows.csv")


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
