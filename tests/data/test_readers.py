"""Files of documents, Parquet and the Hub included: read by one set of rules, or refused by name and place."""

from __future__ import annotations

import csv
import datetime
import gzip
import json
import os
import random
import sys
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mac_rag.data import readers
from mac_rag.data.provenance import Member
from mac_rag.data.readers import find_files, read_documents, read_good_documents
from mac_rag.data.squad import read_official
from mac_rag.data.table import read_table
from mac_rag.data.types import Document
from mac_rag.errors import DataError
from mac_rag.untrusted_files import DOCUMENT, METADATA_DEPTH, NUMBER, ROW
from tests.torture.mutations import little_memory

SIZE = 4 << 20


def refused(path: Path, content: bytes | str, message: str) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with little_memory(), pytest.raises(DataError, match=message) as error:
        read_documents([path])
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"id": "1", "text": "' + b"x" * ROW + b'"}', "line 2 has more than 8,388,608 bytes; split it"),
        (
            b'{"id": "1", "text": "", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "row 2: nested more than 65 deep",
        ),
        (
            b'{"id": "1", "text": "", "many": [' + b"[]," * 300_000 + b"[]]}",
            "row 2: more than 200,000 lists and objects",
        ),
        (b'{"id": "1", "text": "", "year": NaN}', "row 2: NaN is not JSON"),
        (b'{"id": "1", "text": "", "year": ' + b"1" * 5_000 + b"}", "row 2: a number of 5,000 digits"),
        (b'{"id": "1", "id": "2", "text": ""}', "row 2: 'id' comes twice"),
        (b'{"id": "1", "text": "\0"}', "is not a text in UTF-8: line 2 has a NUL"),
        (b'{"id": "1", "text": "\xff"}', "row 2 is not a text in UTF-8: see byte 21"),
        (b'{"id": "2", "text": ', r"row 2: not JSON \(Expecting value, column 21\)"),
        (b'["2", "text"]', "row 2: not a JSON object but list"),
        (b'{"id": "2", "body": "x"}', "row 2: no 'text'; it has 'id', 'body'"),
        (b'{"id": 2, "text": "x"}', "row 2: 'id' must be a text, got 2"),
        (b"{}", "row 2: no 'id'; it has no keys"),
    ],
    ids="long deep many nan digits twice nul bytes cut list fields number keys".split(),
)
def test_rows_of_json_lines(tmp_path: Path, row: bytes, message: str) -> None:
    refused(tmp_path / "rows.jsonl", b'{"id": "0", "text": "fine"}\n' + row + b"\n", message)


def test_a_row_and_its_metadata_may_be_as_large_as_is_said(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    metadata = {"deep": json.loads("[" * (METADATA_DEPTH - 1) + "]" * (METADATA_DEPTH - 1)), "n": 1 - 10**NUMBER}
    row = {"id": "1", "text": "", **metadata}
    row["text"] = "[" * (ROW - len(json.dumps(row)))
    path.write_text(json.dumps(row) + "\n")
    [document] = read_documents([path])
    assert (document.text, document.metadata) == (row["text"], metadata)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('id,text\n1,"' + "x" * (ROW + 1), r"row 1 \(line 2\): .*more than 8,388,608 bytes"),
        ('id,text\n1,"' + "x\n" * (ROW // 2), r"row 1 \(line 2\): .*is a quote open\?"),
        ("id,text\n1,a\n2,\0\n", r"row 2 \(line 3\): .*NUL"),
        ("id,text,id\n1,a,2\n", "the column 'id' comes twice"),
        (b"id,text,\xff\n1,a,b\n", "a name in the header: .* not UTF-8"),
    ],
    ids="cell row nul twice header".split(),
)
def test_tables(tmp_path: Path, content: bytes | str, message: str) -> None:
    refused(tmp_path / "rows.csv", content, message)


@pytest.mark.parametrize(
    ("name", "first", "message"),
    [
        ("rows.jsonl", b'{"id": "1", "text": "a"}\n', "row 200002: it comes after 200,000 blank lines"),
        ("rows.csv", b"id,text\n1,a\n", "row 2 .*200,000 lines, blank ones before it included"),
    ],
)
def test_a_file_of_blank_lines_is_refused_soon(tmp_path: Path, name: str, first: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(first + b"\n" * ROW)
    with pytest.raises(DataError, match=message):
        read_documents([tmp_path / name])
    last = b"\n" + first.splitlines()[-1]
    (tmp_path / name).write_bytes(first + (b"\n" * 9_000 + last) * 3)
    assert len(read_documents([tmp_path / name])) == 4


def test_rows_are_bounded_each_and_not_together(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,text\n" + "".join(f"{number},{'x' * (ROW // 3)}\n" for number in range(5)))
    assert len(list(read_table(path, ("id", "text")))) == 5


@pytest.mark.parametrize("name", ["note.md", "rows.jsonl", "rows.csv"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    with pytest.raises(DataError, match=f"{name} cannot be read: it is a named pipe, not a file"):
        read_documents([path])
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match=f"{name} cannot be read: it is a folder, not a file"):
        read_documents([path])
    path.rmdir()
    (tmp_path / "elsewhere").write_text('{"id": "1", "text": "a"}\n' if name == "rows.jsonl" else "id,text\n1,a\n")
    path.symlink_to("elsewhere")
    assert len(read_documents([path])) == 1  # the user named it


def test_a_document_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_bytes(b"line\n" * SIZE + b"\xff")
    with pytest.raises(DataError, match=f"is not a text in UTF-8: see byte {5 * SIZE:,}"):
        read_documents([path])
    os.truncate(path, 5 * SIZE)
    assert len(read_documents([path])[0].text) == 5 * SIZE
    refused(path, b"x" * (DOCUMENT + 1), "more than 67,108,864 bytes, the most of one document")
    os.truncate(path, 5)
    os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match="is not a text in UTF-8: byte 5 is NUL"):
        read_documents([path])


@pytest.mark.parametrize(
    ("given", "documents"),
    [
        (b"One line without end.", [("-", "One line without end.")]),
        (b"\n \n[1]\n\n", [("-", "\n \n[1]\n\n")]),
        (b"\n" * 20_000 + b'  {"id": "1", "text": "a"}\n{"id": "2", "text": "b"}', [("1", "a"), ("2", "b")]),
        ("\u6cb3".encode() * 3_000_000, [("-", "\u6cb3" * 3_000_000)]),
        (b"", [("-", "")]),
        (b"\n\t\n", [("-", "\n\t\n")]),
    ],
    ids="line list rows long nothing blank".split(),
)
def test_standard_input(given: bytes, documents: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(given)))
    assert [(document.id, document.text) for document in read_documents([Path("-")])] == documents
    assert sys.stdin.buffer.read() == b""  # it is open still


def test_rows_of_standard_input_are_counted_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b'\n\n {"id": "1", "text": "a"}\n[]\n')))
    with pytest.raises(DataError, match="-, row 4: not a JSON object"):
        read_documents([Path("-")])


def test_packed_data_sets_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "train-v1.1.json.gz"
    path.write_bytes(gzip.compress(b" " * (65 << 20)))
    with pytest.raises(DataError, match=r"train-v1\.1\.json\.gz .*more than 67,108,864 bytes when unpacked"):
        list(read_official(path))
    whole = gzip.compress(b'{"data": ') + gzip.compress(b"[]}") + b"\0" * 100
    path.write_bytes(whole)
    assert list(read_official(path)) == []
    path.write_bytes(whole[:30])
    with pytest.raises(DataError, match="ends in the middle"):
        list(read_official(path))


def test_what_the_system_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it looks for files, reads one, and closes it."""
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "text": "A storm."}')

    def refuse(*_: object) -> bool:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_dir", refuse)
        with pytest.raises(DataError, match=f"{tmp_path} cannot be read: Input/output error"):
            find_files([tmp_path])
    monkeypatch.setattr(readers._Lines, "close", refuse)
    with pytest.raises(DataError, match=r"rows.jsonl cannot be read: Input/output error"):
        read_documents([tmp_path / "rows.jsonl"])


ROWS = [("ä", 'Opened, "at last".', "1"), ("b", "Closed;\nfor góod.", "2")]


def delimited(sign: str, end: str = "\n", rows: list[Any] = ROWS) -> str:
    made = StringIO()
    csv.writer(made, delimiter=sign, lineterminator=end).writerows([("id", "text", "n"), *rows])
    return made.getvalue()


JSON_LINES = "".join(json.dumps({"id": i, "text": t, "n": n}, ensure_ascii=False) + "\n" for i, t, n in ROWS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.JSONL", JSON_LINES),
        ("Rows.NdJson", JSON_LINES),
        ("rows.jsonl", "\n" + JSON_LINES.replace("\n", "\n\n")),
        ("rows.jsonl", "\ufeff" + JSON_LINES),
        ("rows.ndjson", JSON_LINES.replace("\n", "\r\n")),
        ("rows.jsonl", "".join("\ufeff" + line for line in JSON_LINES.splitlines(keepends=True))),  # files joined
        ("ROWS.CSV", delimited(",")),
        ("rows.Csv", "\ufeff" + delimited(";", "\r\n")),
        ("rows.csv", delimited("\t")),
        ("rows.TSV", delimited("\t", "\r\n")),
        ("rows.csv", delimited("|")),
        ("rows.csv", "sep=;\r\n" + delimited(";")),
        ("rows.csv", delimited(",") + ",,\n\n,,\n"),
        ("rows.csv", 'id, text, n\nä, "Opened, ""at last"".", 1\nb, "Closed;\nfor góod.", 2\n'),
        ("rows.csv", delimited(",").replace("id,text,n", '"id","text","n"')),
        ("rows.csv", 'id;text;"n"\nä;"Opened, ""at last"".";1\nb;"Closed;\nfor góod.";2'),
    ],
)
def test_rows_are_read_however_they_are_written(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_bytes(content.encode())
    documents = read_documents([tmp_path / name])
    assert documents == [Document(document_id, text, {"n": n}) for document_id, text, n in ROWS]


@given(
    st.lists(st.tuples(st.text("ab,;\t|\"'\n \u00e9", min_size=1), st.text("ab,;\t|\"'\r\n ", min_size=1)), min_size=1),
    st.sampled_from(",;\t|"),
)
def test_any_cells_are_read_back(cells: list[tuple[str, str]], sign: str) -> None:
    rows = [(f"{place}{name}", f"x{text}", "") for place, (name, text) in enumerate(cells)]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        path.write_bytes(delimited(sign, "\r\n", rows).encode())
        assert [(document.id, document.text) for document in read_documents([path])] == [row[:2] for row in rows]


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "note.md").write_bytes(b"\xef\xbb\xbfA storm.")
    assert [document.text for document in read_documents([tmp_path / "note.md"])] == ["A storm."]


@pytest.mark.parametrize(
    ("name", "content", "metadata"),
    [
        ("rows.jsonl", '{"id": "a", "text": "T.", "metadata": {"date": "2004"}, "n": 1}', {"date": "2004", "n": 1}),
        ("rows.jsonl", '{"id": "a", "text": "T.", "metadata": {"metadata": {"id": 1}}}', {"metadata": {"id": 1}}),
        ("rows.jsonl", '{"id": "a", "text": "T.", "metadata": "none"}', {"metadata": "none"}),
        ("rows.csv", 'id,text,metadata\na,T.,"{""date"": ""2004""}"', {"date": "2004"}),
        ("rows.csv", "id,text,supersedes\na,T.,\"['b', 'c']\"", {"supersedes": ["b", "c"]}),
        ("rows.csv", 'id,text,supersedes\na,T.,"[""b""]"', {"supersedes": ["b"]}),
        ("rows.csv", "id,text,supersedes\na,T.,b", {"supersedes": "b"}),
    ],
)
def test_an_object_of_metadata_stands_beside_other_keys(
    tmp_path: Path, name: str, content: str, metadata: dict[str, Any]
) -> None:
    (tmp_path / name).write_text(content)
    assert read_documents([tmp_path / name]) == [Document("a", "T.", metadata)]


def test_a_key_with_two_values_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "text": "T.", "metadata": {"date": "2004"}, "date": "2005"}')
    with pytest.raises(DataError, match="row 1: 'date' is beside 'metadata' and in it; keep one"):
        read_documents([tmp_path / "rows.jsonl"])


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


def test_columns_of_parquet_become_metadata_that_a_bank_keeps(tmp_path: Path) -> None:
    day = datetime.date(2024, 5, 1)
    row = {"id": "a", "text": "Text.", "day": day, "n": 1, "of": {"days": [day], "none": None}}
    [document] = read_documents([write(tmp_path / "rows.parquet", [row])])
    metadata = {"day": "2024-05-01", "n": 1, "of": {"days": ["2024-05-01"], "none": None}}
    assert document == Document("a", "Text.", metadata)
    assert Member.of(document).metadata == metadata


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "3", "text": None}, r"rows\.parquet, row 3: 'text' must be a text, got None"),
        ({"id": None, "text": "Text."}, r"rows\.parquet, row 3: 'id' must be a text, got None"),
        ({"id": "3", "text": " \n"}, r"rows\.parquet, row 3: 'text' is empty"),
        ({"id": "3", "text": "x" * (ROW + 1)}, r"rows\.parquet, row 3: 'text' has more than 8,388,608 characters"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    rows = [{"id": f"{number}", "text": "Text."} for number in range(2)]
    with pytest.raises(DataError, match=message):
        read_documents([write(tmp_path / "rows.parquet", [*rows, row])])


def test_bad_rows_are_left_out_by_their_numbers(tmp_path: Path) -> None:
    rows = [{"id": f"{number}", "text": None if number in (0, 2) else "Text."} for number in range(5)]
    refused: list[str] = []
    good = list(read_good_documents([write(tmp_path / "rows.parquet", rows)], lambda error: refused.append(str(error))))
    path = tmp_path / "rows.parquet"
    assert good == [(f"{path}, row {number + 1}", Document(f"{number}", "Text.")) for number in (1, 3, 4)]
    assert [message.split(":")[0] for message in refused] == [f"{path}, row 1", f"{path}, row 3"]


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.parquet, row 1: no 'text'; it has 'id', 'body'"):
        read_documents([write(tmp_path / "rows.parquet", [{"id": "1", "body": "Text."}])])
    (tmp_path / "rows.parquet").write_text("no Parquet")
    with pytest.raises(DataError, match=r"rows\.parquet is not well-formed Parquet"):
        read_documents([tmp_path / "rows.parquet"])
    with pytest.raises(DataError, match=r"no\.parquet cannot be read: No such file"):
        read_documents([tmp_path / "no.parquet"])
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(DataError, match=r"folder\.parquet cannot be read: it is a folder"):
        read_documents([tmp_path / "folder.parquet"])


def test_a_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.array([b"Text.", b"caf\xe9", b"Text."]).cast(pyarrow.string(), safe=False)
    table = pyarrow.table({"id": ["1", "2", "3"], "text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet, row 2: a value cannot be read: 'utf-8'"):
        read_documents([tmp_path / "rows.parquet"])


def repeated(text: str, count: int) -> Any:
    import pyarrow

    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), [text])


def growing(form: str) -> Any:
    """A table that takes at most two kilobytes in a file, and many megabytes in memory."""
    import pyarrow

    count = {"rows": 50_000, "page": 1}.get(form, 256)
    ids = pyarrow.array([f"{number}" for number in range(count)]) if count < 1_000 else repeated("a", count)
    long = repeated("x" * (1 << 18), 256)
    columns = {
        "texts": {"text": long},
        "list": {"tags": pyarrow.ListArray.from_arrays(pyarrow.array(range(257), pyarrow.int32()), long)},
        "object": {"of": pyarrow.StructArray.from_arrays([long], ["it"])},
        "values": {"tags": pyarrow.ListArray.from_arrays([0, *[65536] * 256], pyarrow.nulls(65536, pyarrow.int8()))},
        "rows": {"text": repeated("a", 50_000)},
        "page": {"text": pyarrow.array(["x" * (2 << 20)])},
    }[form]
    return pyarrow.table({"id": ids, "text": repeated("t", count), **columns})


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("texts", r"up to row [45] its values become too many bytes for its size"),
        ("list", r"up to row [45] its values become too many bytes for its size"),
        ("object", r"up to row [45] its values become too many bytes for its size"),
        ("values", r"its column 'tags\.list\.element' becomes .* bytes with 65,\d{3} values"),
        ("rows", "says that it has 50,000 rows"),
        ("page", "its column 'text' becomes 2,097,.* bytes with 1 values"),
    ],
)
def test_a_file_that_grows_out_of_bounds_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, message: str
) -> None:
    import pyarrow
    import pyarrow.parquet

    small = {"_MOST_DECODED": 1 << 20, "_GROWTH": 64, "_MOST_VALUES": 1 << 10, "_VALUES_OF_BYTE": 8}
    small["_LONG_BATCH"] = 1 << 18
    for name, value in small.items():
        monkeypatch.setattr(readers, name, value)

    path = tmp_path / "rows.parquet"
    options = {"compression": "brotli", "dictionary_pagesize_limit": 64 << 20, "write_statistics": False}
    pyarrow.parquet.write_table(growing(form), path, use_dictionary=form != "page", store_schema=False, **options)
    assert path.stat().st_size < 2_000
    with pytest.raises(DataError, match=rf"rows\.parquet cannot be read: .*{message}"):
        read_documents([path])


def test_texts_that_repeat_are_no_fault(tmp_path: Path) -> None:
    """As paragraphs with many questions do, also in lists, objects and mappings."""
    import pyarrow
    import pyarrow.parquet

    text = "A storm has hit the town. " * 400
    of = {"it": None, "more": [text[:9]]}
    rows = [{"id": f"{n}", "text": text, "tags": ["a", text[:n]], "of": of} for n in range(300)]
    table = pyarrow.Table.from_pylist(rows)
    kind = pyarrow.map_(pyarrow.string(), pyarrow.string())
    pairs = pyarrow.array([[("k", f"{n}")] * (n % 3) for n in range(300)], kind)
    pyarrow.parquet.write_table(table.append_column("pairs", pairs), tmp_path / "rows.parquet", row_group_size=100)
    found = read_documents([tmp_path / "rows.parquet"])
    assert [document.metadata["tags"] for document in found] == [row["tags"] for row in rows]
    assert [len(document.metadata["pairs"]) for document in found] == [n % 3 for n in range(300)]


def test_a_damaged_file_is_read_or_refused(tmp_path: Path) -> None:
    rows = [{"id": f"{number}", "text": f"Tëxt {number}.", "n": number} for number in range(9)]
    data = write(tmp_path / "rows.parquet", rows).read_bytes()
    draw, refused = random.Random(0), 0
    for _ in range(200):
        damaged = bytearray(data)
        damaged[draw.randrange(len(data))] = draw.randrange(256)
        (tmp_path / "rows.parquet").write_bytes(damaged)
        try:
            read_documents([tmp_path / "rows.parquet"])
        except DataError:  # and no other error
            refused += 1
    assert refused > 20


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    for path in ("rows.parquet", "hub:someone/missing"):
        with pytest.raises(DataError, match=r"pip install 'mac-rag\[hub-data\]'"):
            read_documents([Path(path)])


def test_a_data_set_of_the_hub_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []
    rows = [{"id": f"{number}", "text": "Text.", "n": number} for number in range(5)]

    def load(*names: Any, **options: Any) -> Any:
        asked.append((*names, options["split"]))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    whole = read_documents([Path("hub:someone/read")])
    assert whole == [Document(row["id"], row["text"], {"n": row["n"]}) for row in rows]
    assert len(read_documents([Path("hub:someone/read/2024.en:test")])) == 5
    assert asked == [("someone/read", None, "train"), ("someone/read", "2024.en", "test")]


def test_a_data_set_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(*names: Any, **options: Any) -> Any:
        raise FileNotFoundError("nothing there")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(DataError, match=r"hub:someone/lost could not be read from the .* Hub .*nothing there"):
        read_documents([Path("hub:someone/lost")])
    with pytest.raises(DataError, match="'hub:lost' names no data set; write hub:OWNER/NAME"):
        read_documents([Path("hub:lost")])


def test_a_folder_stands_for_the_files_in_it(tmp_path: Path) -> None:
    for name in ("b.md", "a/z.md", "a/.hidden", ".git/config", "c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in find_files([tmp_path / "c.jsonl", tmp_path])]
    assert found == ["c.jsonl", "a/z.md", "b.md", "c.jsonl"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty is a folder without files; give files"):
        find_files([tmp_path / "empty"])
