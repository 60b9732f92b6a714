"""The derived file of the keys: it is used where it is right, and a bank reads the same without it."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.bank import MemoryBank
from mac_rag.bank import bank as module
from mac_rag.bank.copies import backup, restore
from mac_rag.bank.database import Connection
from mac_rag.bank.directory import Directory
from mac_rag.bank.keys_file import keys_path, read_keys_file
from mac_rag.bank.rows import RowLayout, Summaries
from mac_rag.data.types import Document
from mac_rag.errors import DamageError
from tests.bank.helpers import fast_folder, memory

LAYOUT = RowLayout(dtype="fp32", summary=3, lexical_vectors=1)


@pytest.fixture(autouse=True)
def _few_rows_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MANY_ROWS", 4)


def add(bank: MemoryBank, names: str, value: float = 1.0) -> None:
    bank.put(
        [Document(name, name, {"supersedes": ["x", "y"]} if name == "a" else {}) for name in names],
        torch.cat([memory(1, value + number) for number in range(2 * len(names))]),
        [2] * len(names),
        summarise=lambda kept: kept[:, 0],
    )
    bank.commit()


def made(path: Path, names: str = "abc") -> Path:
    with MemoryBank.create(path, "f00d") as bank:
        bank.keep_rows_as(LAYOUT)
        add(bank, names)
    return path


def read(path: Path) -> tuple[object, ...]:
    """All that can be in the file of the keys, as a new reader sees it."""
    return seen(MemoryBank.open(path))


def seen(bank: MemoryBank) -> tuple[object, ...]:
    tensors = (bank.row_keys, *(getattr(bank.directory, column.name) for column in fields(Directory)))
    summaries = Summaries.cat(list(bank.overview()))
    tensors += (summaries.summaries, *summaries.lexical)
    return (*(tensor.tolist() for tensor in tensors), bank.phi.tolist(), bank.document_ids)


def read_without(path: Path) -> tuple[object, ...]:
    with fast_folder() as folder:
        backup(path, folder / "bank")
        return read(folder / "bank")


def is_used(path: Path) -> bool:
    """True if the keys are read from their file, and not from the bank."""
    bank = MemoryBank.open(path)
    rows, statements = type(bank.connection).rows, list[str]()

    def noted(link: Connection, statement: str, *arguments: Any) -> Any:
        statements.append(statement)
        return rows(link, statement, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "rows", noted)
        list(bank.overview())
    return bool(bank._state.keys) and not any("overview_crc" in statement for statement in statements)


def test_it_is_written_by_a_writer_that_closes_or_compacts_a_large_bank(folder: Path) -> None:
    small = made(folder / "small", "a")
    assert not keys_path(small).exists()
    bank = made(folder / "bank")
    assert is_used(bank)
    with MemoryBank.open(bank, write=True) as opened:
        keys_path(bank).unlink()
        opened.compact()
        assert keys_path(bank).exists()
        opened.compact()
        assert is_used(bank)
    with MemoryBank.create(folder / "plain", "f00d") as plain:
        plain.put([Document(str(number), "") for number in range(9)], memory(9))
        plain.commit()
    assert not keys_path(folder / "plain").exists()  # there are no summaries to keep
    assert read(bank) == read_without(bank)


def test_what_came_after_it_is_read_from_the_bank(folder: Path) -> None:
    bank = made(folder / "bank", "abcdefghijABCDEF")
    with MemoryBank.open(bank, write=True) as opened:
        before = keys_path(bank).stat().st_ino
        add(opened, "k", 50)
        assert seen(opened) == read(bank) == read_without(bank)
    assert keys_path(bank).stat().st_ino == before  # a row in twenty is not worth another file
    assert read(bank) == read_without(bank)
    with MemoryBank.open(bank, write=True) as opened:
        add(opened, "lmno", 60)
    assert keys_path(bank).stat().st_ino != before
    assert is_used(bank)
    assert read(bank) == read_without(bank)


CHANGES: dict[str, Callable[[MemoryBank], object]] = {
    "delete": lambda bank: bank.delete("b"),
    "replace": lambda bank: bank.put([Document("b", "new")], memory(1, 9)),
    "merge": lambda bank: bank.merge(["a", "b"], memory(1, 9)),
    "describe": lambda bank: bank.describe([Document("b", "b", {"date": "2001", "supersedes": "c"})]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_goes_when_something_of_it_is_deleted(folder: Path, change: str) -> None:
    bank = made(folder / "bank", "abcd")
    reader = MemoryBank.open(bank)
    with MemoryBank.open(bank, write=True) as opened:
        whole = seen(opened)
        CHANGES[change](opened)
        assert seen(opened) == seen(opened) != whole
        opened.rollback()
        assert seen(opened) == whole
        CHANGES[change](opened)
        changed = seen(opened)
        stale = keys_path(bank).read_bytes()
        opened.commit()
        assert not keys_path(bank).exists()
        assert seen(opened) == read(bank)
        keys_path(bank).write_bytes(stale)  # as after a crash between the two
        assert read(bank) == changed or change == "describe"
        assert reader.refresh()
        assert seen(reader) == read(bank) == read_without(bank)
    assert keys_path(bank).read_bytes() != stale  # the last writer has written it again
    assert read(bank) == read_without(bank)


def test_that_of_another_bank_or_of_another_state_is_not_used(folder: Path) -> None:
    bank, other = made(folder / "bank"), made(folder / "other", "xyz")
    backup = shutil.copy(bank, folder / "backup")
    shutil.copy(keys_path(other), keys_path(bank))
    assert not is_used(bank)
    with MemoryBank.open(bank, write=True) as opened:
        opened.delete("a")
        add(opened, "fgh", 20)
    assert is_used(bank)
    assert read(bank) == read_without(bank)
    shutil.copy(backup, bank)  # an older state below newer keys
    assert not is_used(bank)
    assert read(bank)[-1] == ["a", "b", "c"]
    with MemoryBank.open(bank, write=True) as opened:  # which goes on another way
        opened.delete("c")
        add(opened, "pq", 30)
        assert seen(opened)[-1] == ["a", "b", "p", "q"]
    assert read(bank) == read_without(bank)
    restore(other, bank, replace=True)
    assert not keys_path(bank).exists()
    assert read(bank)[-1] == ["x", "y", "z"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_one_is_not_used(data: st.DataObject) -> None:
    with fast_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MANY_ROWS", 4)
        bank = made(folder / "bank")
        with MemoryBank.open(bank, write=True) as opened:
            add(opened, "d")
        expected = read_without(bank)
        written = keys_path(bank).read_bytes()
        start = data.draw(st.integers(0, 1 << 16)) % len(written)  # whose length is not always the same
        taken = data.draw(st.integers(0, 4))
        new = data.draw(st.binary(min_size=taken, max_size=taken) | st.binary(max_size=4))
        keys_path(bank).write_bytes(written[:start] + new + written[start + taken :])
        found = read_keys_file(bank)
        assert found is None or found.commit[1] in bank.read_bytes().decode("latin1")
        assert read(bank) == expected


def test_a_document_that_the_bank_has_lost_is_not_left_out(folder: Path) -> None:
    bank = made(folder / "bank")
    with closing(sqlite3.connect(bank)) as connection, connection:
        connection.execute("UPDATE document SET key = -1 WHERE id = 'b'")
    assert is_used(bank)  # so the documents were not looked through
    with pytest.raises(DamageError, match="entry 1 has no documents"):
        list(MemoryBank.open(bank))


def test_a_damaged_one_is_written_again_by_a_writer_that_needed_it(folder: Path) -> None:
    bank = made(folder / "bank")
    written = keys_path(bank).read_bytes()
    last = keys_path(bank).stat().st_size - 1
    keys_path(bank).write_bytes(written[:last] + bytes([written[last] ^ 1]))
    assert not is_used(bank)
    with MemoryBank.open(bank, write=True) as opened:
        assert seen(opened) == read_without(bank)
    assert keys_path(bank).read_bytes() == written
    assert is_used(bank)
