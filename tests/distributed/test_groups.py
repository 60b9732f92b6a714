"""A group of documents is read again from its place, whatever stands around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mac_rag.data.provenance import content_hash
from mac_rag.data.readers import placed_documents
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
