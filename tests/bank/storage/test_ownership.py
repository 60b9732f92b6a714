"""Only the holder of the lock writes, and only to the commit that it knows."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mac_rag.bank import MemoryBank
from mac_rag.bank.verify import verify
from mac_rag.data.types import Document
from mac_rag.errors import BankError, FingerprintError
from tests.bank.helpers import contents, memory, put


def test_a_fork_cannot_write_and_does_not_free_the_lock(folder: Path) -> None:
    bank = MemoryBank.create(folder, "f00d")
    put(bank, "a", 1)
    if (child := os.fork()) == 0:
        try:
            put(bank, "b", 2)
        except BankError as error:
            bank.close()
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(BankError, match="open for writing in process"):
        MemoryBank.open(folder, write=True)
    put(bank, "c", 3)
    bank.close()
    assert contents(MemoryBank.open(folder)) == {"a": 1, "c": 3}


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_lock_that_was_taken_away(folder: Path, how: str) -> None:
    bank = MemoryBank.create(folder, "f00d")
    put(bank, "a", 1)
    (folder / "writer.lock").unlink()
    other = None
    if how == "replaced":
        other = MemoryBank.open(folder, write=True)
        put(other, "b", 2)
    with pytest.raises(BankError, match=r"writer.lock was removed or replaced"):
        put(bank, "c", 3)
    bank.close()
    if other is not None:
        assert (folder / "writer.json").exists()  # the other's
        put(other, "d", 4)
        other.close()
    assert contents(MemoryBank.open(folder)) == ({"a": 1} if other is None else {"a": 1, "b": 2, "d": 4})
    assert verify(folder).clean


def test_a_commit_onto_another_generation(folder: Path, tmp_path: Path) -> None:
    """As when the folder is on two machines, or a backup is put in its place."""
    bank = MemoryBank.create(folder / "bank", "f00d")
    put(bank, "a", 1)
    shutil.copytree(folder / "bank", tmp_path / "backup")
    put(bank, "b", 2)
    for name in ("manifest.json", "manifest.copy.json"):
        shutil.copy(tmp_path / "backup" / name, folder / "bank" / name)
    for file in (tmp_path / "backup").glob("segment-*"):
        shutil.copy(file, folder / "bank" / file.name)
    with pytest.raises(BankError, match=r"is at generation 1, and this process left it at 2"):
        put(bank, "c", 3)
    bank.close()
    assert contents(MemoryBank.open(folder / "bank")) == {"a": 1}


def copy_over(source: Path, target: Path) -> None:
    shutil.rmtree(target)
    shutil.copytree(source, target)


def test_a_reader_follows_a_bank_that_falls_back(folder: Path, tmp_path: Path) -> None:
    place, backup = folder / "bank", tmp_path / "backup"
    with MemoryBank.create(place, "f00d") as bank:
        for number, name in enumerate("abcde"):
            put(bank, name, number)
    shutil.copytree(place, backup)
    with MemoryBank.open(place, write=True) as bank:
        bank.delete("b")
        bank.commit()
        put(bank, "f", 6)
    reader = MemoryBank.open(place)
    snapshot = reader.snapshot()
    copy_over(backup, place)
    history = reader.history
    assert reader.refresh()
    assert contents(reader) == {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}
    # The deleted entry is back, so a key no longer says which row it is.
    assert reader.history > history
    assert contents(snapshot) == {"a": 0, "c": 2, "d": 3, "e": 4, "f": 6}
    # From the backup it goes on another way: the numbers of what was written after it are used again.
    with MemoryBank.open(place, write=True) as bank:
        history = reader.history
        put(bank, "x", 10)
        assert reader.refresh()
        assert reader.history == history
    assert reader.row_keys[-1] == snapshot.row_keys[-1]


@pytest.mark.parametrize("seen", ["before", "after"])
def test_a_history_that_was_rewritten_is_noticed_behind_a_higher_generation(folder: Path, seen: str) -> None:
    place, backup = folder / "bank", folder / "backup"
    with MemoryBank.create(place, "f00d") as bank:
        put(bank, "a", 1)
        shutil.copytree(place, backup)
        reader = MemoryBank.open(place)
        put(bank, "b", 2)
    if seen == "after":
        reader = MemoryBank.open(place)
    copy_over(backup, place)
    with MemoryBank.open(place, write=True) as bank:
        put(bank, "c", 3)
        put(bank, "d", 4)
    history = reader.history
    assert reader.refresh()
    assert contents(reader) == {"a": 1, "c": 3, "d": 4}
    assert (reader.history > history) == (seen == "after")


def test_a_reader_refuses_the_bank_of_another_model(folder: Path) -> None:
    place = folder / "bank"
    with MemoryBank.create(place, "f00d") as bank:
        put(bank, "a", 1)
    reader = MemoryBank.open(place)
    shutil.rmtree(place)
    with MemoryBank.create(place, "beef") as bank:
        put(bank, "b", 1)
    with pytest.raises(FingerprintError, match="model f00d and has been replaced by a bank of model beef"):
        reader.refresh()
    assert contents(reader) == {"a": 1}


@pytest.mark.parametrize("way", ["create", "first commit"])
def test_what_an_attempt_to_make_a_bank_leaves_does_not_stop_the_next(folder: Path, way: str) -> None:
    from tests.faults import faults

    place = folder / "bank"
    for number in range(1, 100):
        bank = MemoryBank.create_on_commit(place, "f00d")
        bank.put([Document("a", "text")], memory(1, 5))
        with faults(folder) as fault:
            fault.at(number)
            try:
                bank.commit() if way == "first commit" else bank.save(place)
                failed = False
            except BankError:
                failed = True
        if failed:
            assert not place.exists(), fault.failed
            bank.commit()
        assert contents(MemoryBank.open(place)) == {"a": 5}, fault.failed
        bank.close()
        shutil.rmtree(place)
        if fault.failed is None:
            return
    pytest.fail("it never came to an end")
