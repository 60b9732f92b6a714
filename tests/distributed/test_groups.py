"""A group of documents is read again from its place, whatever stands around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mac_rag.data.provenance import content_hash
from mac_rag.data.readers import placed_documents
from mac_rag.data.types import Document
from mac_rag.distributed.groups import Found, Group
from mac_rag.errors import DataError


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    for name in ("a", "b"):
        lines = [f'{{"id": "{name}{number}", "text": "Text {number}."}}' for number in range(9)]
        (tmp_path / f"{name}.jsonl").write_text("\n\n".join(lines) + "\n")
    return [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]


def found(files: list[Path]) -> list[Found]:
    return [
        Found(number, place, document.id, content_hash(document))
        for number, file in enumerate(files)
        for place, document in placed_documents(file)
    ]


def test_documents_are_read_over_gaps_and_ends_of_files(files: list[Path]) -> None:
    chosen = [each for each in found(files) if each.id in ("a5", "a8", "b0", "b3")]
    group = Group.of(chosen, [True, False, True, False])
    documents = group.read(files)
    assert [document.id for document in documents] == ["a5", "a8", "b0", "b3"]
    assert [document.id for document in group.new(documents)] == ["a5", "b0"]


def test_a_changed_document_is_noticed(files: list[Path]) -> None:
    group = Group.of(found(files)[3:6], [True] * 3)
    files[0].write_text(files[0].read_text().replace("Text 5", "Text 6"))
    with pytest.raises(DataError, match=r"a\.jsonl, or a file after it, has changed .* run the command again"):
        group.read(files)


def test_the_key_of_a_block_covers_what_its_memory_tokens_depend_on(files: list[Path]) -> None:
    some = found(files)
    key = Group.of(some[:3], [True] * 3).key("model")
    assert key == Group.of([*some[:3], some[5]], [True, True, True, False]).key("model")
    others = [
        Group.of(some[:3], [True] * 3).key("another model"),
        Group.of(some[:2], [True] * 2).key("model"),
        Group.of([some[1], some[0], some[2]], [True] * 3).key("model"),
        Group.of([some[0]._replace(id="x"), *some[1:3]], [True] * 3).key("model"),
        Group.of([some[0]._replace(content_hash="x"), *some[1:3]], [True] * 3).key("model"),
    ]
    assert len({key, *others}) == 6


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet"])
def test_a_file_is_read_from_any_document_on(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    rows = [{"id": f"ä{number}", "text": f"Two\nlines, {number}.", "n": str(number)} for number in range(7)]
    write = {"rows.jsonl": write_jsonl, "rows.csv": write_csv, "rows.parquet": write_parquet}[name]
    write(path, rows)
    whole = list(placed_documents(path))
    assert [document for _, document in whole] == [Document(row["id"], row["text"], {"n": row["n"]}) for row in rows]
    for number, (place, _) in enumerate(whole):
        assert list(placed_documents(path, place)) == whole[number:]


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> None:
    import json

    path.write_text("\n" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))


def write_csv(path: Path, rows: list[dict[str, str]]) -> None:
    import csv

    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["id", "text", "n"])
        writer.writeheader()
        for row in rows:
            file.write("\r\n")
            writer.writerow(row)


def write_parquet(path: Path, rows: list[dict[str, str]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
