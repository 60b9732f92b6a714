"""Documents from Parquet files and from data sets of the Hub, by the rules of all other files."""

from __future__ import annotations

import datetime
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from mac_rag.data.provenance import Member
from mac_rag.data.readers import find_files, placed_documents, read_documents, read_good_documents
from mac_rag.data.types import Document
from mac_rag.errors import DataError
from mac_rag.untrusted_files import ROW


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


def test_a_data_set_of_the_hub_is_read_from_any_row_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []
    rows = [{"id": f"{number}", "text": "Text.", "n": number} for number in range(5)]

    def load(*names: Any, **options: Any) -> Any:
        asked.append((*names, options["split"]))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    whole = list(placed_documents(Path("hub:someone/read")))
    assert [document for _, document in whole] == [Document(row["id"], row["text"], {"n": row["n"]}) for row in rows]
    for number, (place, _) in enumerate(whole):
        assert list(placed_documents(Path("hub:someone/read"), place)) == whole[number:]
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
