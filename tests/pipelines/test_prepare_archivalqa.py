"""Public questions paired with a corpus in NITF XML, loose or in .tgz archives; and newswire in the same schema."""

from __future__ import annotations

import csv
import io
import shutil
import tarfile
from pathlib import Path

import pytest

from mac_rag.data import load_dataset
from mac_rag.errors import DataError
from pipelines.prepare_archivalqa import (
    YEARS,
    find_articles,
    parse_article,
    read_articles,
    read_questions,
    write_splits,
)
from pipelines.prepare_archivalqa import main as prepare

HEADER = '<?xml version="1.0" encoding="UTF-8"?>\n<!DOCTYPE nitf SYSTEM "http://www.nitf.org/nitf-3-3.dtd">\n'
PUBLIC = "id,question,answer,org_answer,answer_start,para_id,trans_que,trans_ans,source\n"


def nitf(number: int, year: int, *paragraphs: str, month: str = "2", day: str = "9") -> bytes:
    body = "".join(f"<p>{paragraph}</p>" for paragraph in paragraphs)
    text = f"""{HEADER}<nitf><head><title>Title {number}</title>
        <meta content="{day}" name="publication_day_of_month"/><meta content="{month}" name="publication_month"/>
        <meta content="{year}" name="publication_year"/>
        <docdata><doc-id id-string="{number}"/></docdata></head>
        <body><body.head><hedline><hl1>Headline</hl1></hedline></body.head>
        <body.content><block class="lead_paragraph"><p>Lead.</p></block><block class="full_text">{body}</block>
        </body.content></body></nitf>"""
    return text.encode()


def archive(file: Path, **members: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(f"02/09/{name}.xml")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A corpus as it ships: one archive a month under the year, here also one unpacked file."""
    folder = tmp_path / "nyt_corpus"
    archive(folder / "data/1988/02.tgz", a=nitf(100, 1988, "Zero.", "Mr. Paik fled to Hong Kong."))
    archive(folder / "data/1992/02.tgz", b=nitf(200, 1992, "A &amp; B won."), c=nitf(201, 1992, "Unasked."))
    archive(folder / "data/2001/02.tgz", d=nitf(300, 2001, "One.", "", "Three is <em>here</em>."))
    archive(folder / "data/2003/02.tgz", e=nitf(400, 2003, "Val."))
    (folder / "data/2007/02/09").mkdir(parents=True)
    (folder / "data/2007/02/09/0000500.xml").write_bytes(nitf(500, 2007, "Test é."))
    (folder / "docs").mkdir()
    (folder / "docs/index.xml").write_text("<index/>")
    return folder


def questions(tmp_path: Path, *rows: str) -> Path:
    file = tmp_path / "ArchivalQA_val.csv"
    file.write_text(PUBLIC + "".join(f"{row}\n" for row in rows))
    return file


def row(name: str, paragraph_id: str) -> str:
    return f"{name},Question {name}?,Answer {name},org,12,{paragraph_id},0,0,wiki"


def test_questions_paired_and_split_by_year(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paragraphs = "500_0 100_1 200_0 300_2 400_0 100_1 999_0 400_7 300_1".split()
    asked = [row(f"val_{number}", paragraph) for number, paragraph in enumerate(paragraphs)]
    prepare([questions(tmp_path, *asked)], corpus, tmp_path / "out")
    expected = {
        "qa_lt": [("100_1", "Mr. Paik fled to Hong Kong.", "1988-02-09", ["val_1", "val_5"])],
        "qa_lt_val": [("200_0", "A & B won.", "1992-02-09", ["val_2"])],
        "train": [("300_2", "Three is here.", "2001-02-09", ["val_3"])],
        "val": [("400_0", "Val.", "2003-02-09", ["val_4"])],
        "test": [("500_0", "Test é.", "2007-02-09", ["val_0"])],
    }
    for split, documents in expected.items():
        dataset = load_dataset("archivalqa", split, tmp_path / "out")
        asked_of = dataset.questions_by_document()
        assert documents == [
            (document.id, document.text, document.metadata["date"], [question.id for question in asked_of[document.id]])
            for document in dataset.documents
        ]
        assert all(question.answers == (f"Answer {question.id}",) for question in dataset.questions)
    printed = capsys.readouterr().out
    assert "qa_lt.csv: 2 questions" in printed
    assert "left out: 1 questions, whose article is not in the corpus" in printed
    assert "left out: 2 questions, whose article has no such paragraph" in printed


def test_a_row_holds_all_paragraphs_of_its_article(tmp_path: Path, corpus: Path) -> None:
    prepare([questions(tmp_path, row("val_3", "300_2"))], corpus, tmp_path / "out")
    with (tmp_path / "out/train.csv").open(newline="") as stream:
        (written,) = csv.DictReader(stream)
    assert written["text"] == '["One.", "", "Three is here."]'
    assert written["ans_text"] == "One.\n\nThree is here."
    assert [written[name] for name in ("doc_id", "para_num", "title", "year")] == ["300", "2", "Title 300", "2001"]


def test_questions_need_only_three_columns(tmp_path: Path, corpus: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("para_id,answer,question\n100_0,a,q?\n100_0,b,r?\n")
    prepare([file], corpus, tmp_path / "out")
    dataset = load_dataset("archivalqa", "qa_lt", tmp_path / "out")
    assert [question.id for question in dataset.questions] == ["mine-1", "mine-2"]
    with pytest.raises(DataError, match=r"the split 'test' of archivalqa in .* holds no question"):
        load_dataset("archivalqa", "test", tmp_path / "out")


def test_the_corpus_is_read_no_further_than_needed(tmp_path: Path, corpus: Path) -> None:
    (corpus / "data/2007/02/09/0000501.xml").write_text("<broken")
    asked = read_questions([questions(tmp_path, row("val_1", "100_1"))])
    assert set(find_articles(corpus, asked)) == {"100"}
    assert sorted(year for years in YEARS.values() for year in years) == list(range(1987, 2008))


@pytest.mark.parametrize(
    "date", [{"year": 1986}, {"year": 2008}, {"year": 1999, "month": "13"}, {"year": 1999, "day": ""}]
)
def test_an_article_without_a_date_of_the_corpus_is_left_out(tmp_path: Path, date: dict[str, str]) -> None:
    article = parse_article(nitf(7, int(date.pop("year")), "Text.", **date), "7.xml")
    assert article is not None
    asked = read_questions([questions(tmp_path, row("val_0", "7_0"))])
    counts, unmatched = write_splits(asked, {"7": article}, tmp_path / "out")
    assert counts == {}
    assert dict(unmatched) == {"whose article has no date from 1987 to 2007": 1}
    assert not (tmp_path / "out").exists()


def test_questions_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    columns = ("question", "answer", "para_id")
    for column in columns:
        (tmp_path / "mine.csv").write_text(",".join(name for name in columns if name != column) + "\n")
        with pytest.raises(DataError, match=f"mine.csv: missing column '{column}'"):
            read_questions([tmp_path / "mine.csv"])
    for paragraph_id in ("1839755", "1839755_x", "_3", "1839755_-1", f"1_{'9' * 5000}"):
        file = questions(tmp_path, row("val_0", "1_0"), row("val_1", paragraph_id))
        reason = r"row 2 \(line 3\), column 'para_id': .* is not <doc_id>_<paragraph number>"
        with pytest.raises(DataError, match=reason):
            read_questions([file])
    file = questions(tmp_path, row("val_0", "1_0"))
    with pytest.raises(DataError, match=r"row 1 .*, column 'id': 'val_0' is the id of another question"):
        read_questions([file, file])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('<!DOCTYPE n [<!ENTITY a "lol">]><n>&a;</n>', "entity 'a'"),
        ('<!DOCTYPE n [<!ENTITY f SYSTEM "file:///etc/passwd">]><n>&f;</n>', "entity 'f'"),
        ('<!DOCTYPE n [<!ENTITY % p SYSTEM "http://localhost/x.dtd"> %p;]><n/>', "entity 'p'"),
        ('<!DOCTYPE n SYSTEM "n.dtd"><n>&eacute;</n>', "entity 'eacute'"),
        ("<n>&eacute;</n>", "not well-formed"),
        ("<n>", "not well-formed"),
        ("", "not well-formed"),
        ('<?xml version="1.0" encoding="klingon"?><n/>', "not well-formed"),
    ],
)
def test_unsafe_or_broken_xml_is_refused_by_name(content: str, message: str) -> None:
    with pytest.raises(DataError, match=f"02.tgz:09/7.xml .*{message}"):
        parse_article(content.encode(), "02.tgz:09/7.xml")


def test_a_truncated_archive_is_refused_by_name(tmp_path: Path) -> None:
    members = {f"m{n}": nitf(n, 1999, "Text.") for n in range(300)}
    archive(tmp_path / "02.tgz", **members)
    whole = (tmp_path / "02.tgz").read_bytes()
    assert len(list(read_articles(tmp_path))) == 300
    for cut in (10, len(whole) // 2, len(whole) - 5):
        (tmp_path / "02.tgz").write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"02.tgz is not a whole .tgz archive"):
            list(read_articles(tmp_path))


def test_folders_without_a_corpus_or_a_match_are_refused(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(DataError, match=r"none of the 1 questions matches .*: 1 whose article is not in the corpus"):
        prepare([questions(tmp_path, row("val_0", "999_0"))], corpus, tmp_path / "out")
    shutil.rmtree(corpus)
    with pytest.raises(DataError, match=r"holds no \.xml file"):
        list(read_articles(tmp_path))
    with pytest.raises(DataError, match="is not a folder"):
        prepare([questions(tmp_path, row("val_0", "1_0"))], tmp_path / "none", tmp_path / "out")
