"""Readers that follow a bank: other processes' commits, restored and pulled banks, and files that are replaced."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mac_rag.bank import MemoryBank
from mac_rag.bank.copies import backup, restore, take_over
from mac_rag.bank.verify import verify
from mac_rag.data.types import Document
from mac_rag.errors import BankError, DamageError, FingerprintError
from tests.bank.helpers import alter, contents, memory, put


def made(path: Path, names: str = "abc", fingerprint: str = "f00d") -> Path:
    with MemoryBank.create(path, fingerprint) as bank:
        for number, name in enumerate(names):
            put(bank, name, number)
    return path


def copied(source: Path, path: Path) -> Path:
    shutil.copy(source, path)
    return path


def rows_by_key(bank: MemoryBank) -> dict[int, tuple[str, float]]:
    names = [names[0] for names in bank.row_members]
    return dict(zip(bank.row_keys.tolist(), zip(names, bank.phi[:, 0, 0].tolist()))) if names else {}


class Follower:
    """A reader, and all that the keys of its rows have meant within its present history."""

    def __init__(self, path: Path) -> None:
        self.bank = MemoryBank.open(path)
        self.meant = rows_by_key(self.bank)

    def follows(self) -> bool:
        """Refreshes the reader; True if it has begun a new history. It must not tell two rows by one key."""
        history = self.bank.history
        self.bank.refresh()
        found = rows_by_key(MemoryBank.open(self.bank.path or ""))
        assert rows_by_key(self.bank) == found
        if self.bank.history == history:
            assert all(self.meant.get(key, row) == row for key, row in found.items())
            self.meant |= found
        else:
            self.meant = found
        return self.bank.history > history


def test_a_reader_follows_commits_of_others(folder: Path) -> None:
    path = made(folder / "bank")
    reader = Follower(path)
    snapshot = reader.bank.snapshot()
    assert not reader.bank.refresh()
    with MemoryBank.open(path, write=True) as bank:
        bank.delete("b")
        put(bank, "d", 4)
        assert contents(reader.bank) == {"a": 0, "b": 1, "c": 2}
        assert not reader.follows()
        bank.describe([Document("a", "text 0", {"date": "2001"})])
        bank.merge(["c", "d"], memory(1, 7))
        bank.commit()
        assert not reader.follows()
        assert reader.bank["a"].metadata == {"date": "2001"}
        assert reader.bank.directory.dates[0] == reader.bank["a"].members[0].moment
        bank.compact() if bank.refresh() else bank.commit()
        for name in reader.bank.document_ids[::2]:
            bank.delete(name)
        bank.commit()
        assert not reader.follows()
    assert contents(snapshot) == {"a": 0, "b": 1, "c": 2}
    snapshot.release()
    with pytest.raises(BankError, match="was released"):
        _ = snapshot.document_ids


@pytest.mark.parametrize("same", [True, False])
def test_readers_go_on_to_a_backup_that_is_put_back(folder: Path, same: bool) -> None:
    path = made(folder / "bank")
    saved = folder / "saved"
    assert backup(path, saved) == 3
    with pytest.raises(BankError, match="holds a memory bank or another file"):
        restore(saved, path)
    with MemoryBank.open(saved if not same else path, write=True) as bank:
        bank.delete("b")
        put(bank, "d", 4)
    reader = Follower(path)
    assert restore(saved, path, replace=True) == 3
    assert reader.follows() == same  # otherwise its last commit is one of those of the backup
    assert sorted(contents(reader.bank)) == (["a", "b", "c"] if same else ["a", "c", "d"])
    with MemoryBank.open(path, write=True) as bank:
        put(bank, "e", 5)
    assert not reader.follows()
    assert restore(made(folder / "other", "xyz"), path, replace=True) == 3
    assert reader.follows()
    assert verify(path).clean


def test_what_replaces_a_bank_must_be_of_its_kind(folder: Path) -> None:
    path = made(folder / "bank")
    other = made(folder / "other", fingerprint="beef")
    with pytest.raises(FingerprintError, match=r"written by model beef .* model f00d; choose a new file"):
        restore(other, path, replace=True)
    with MemoryBank.open(path, write=True), pytest.raises(BankError, match="open for writing"):
        restore(path, path, replace=True)
    later = copied(path, folder / "later")
    with MemoryBank.open(later, write=True) as bank:
        put(bank, "d", 4)
    take_over(path, copied(later, folder / "copy"))
    with MemoryBank.open(path, write=True) as bank:
        put(bank, "e", 5)
    with pytest.raises(BankError, match="at commit 5, and what was fetched, at 4, is an older state"):
        take_over(path, later)
    assert sorted(contents(MemoryBank.open(path))) == ["a", "b", "c", "d", "e"]


def moved(source: Path, path: Path) -> None:
    """Puts a copy of a bank in the place of another, as mv does."""
    copied(source, path.with_name("moved")).replace(path)


def test_a_reader_follows_a_bank_that_falls_back(folder: Path) -> None:
    path = made(folder / "bank", "abcde")
    saved = copied(path, folder / "saved")
    with MemoryBank.open(path, write=True) as bank:
        bank.delete("b")
        put(bank, "f", 6)
    reader = Follower(path)
    snapshot = reader.bank.snapshot()
    moved(saved, path)
    assert reader.follows()
    assert contents(snapshot) == {"a": 0, "c": 2, "d": 3, "e": 4, "f": 6}
    del snapshot
    # From the backup it goes on another way: the numbers of what was written after it are used again.
    with MemoryBank.open(path, write=True) as bank:
        put(bank, "x", 10)
    assert not reader.follows()


@pytest.mark.parametrize("seen", ["before", "after"])
def test_a_history_that_was_rewritten_is_noticed_after_more_commits(folder: Path, seen: str) -> None:
    path = made(folder / "bank")
    saved = copied(path, folder / "saved")
    before = Follower(path) if seen == "before" else None
    with MemoryBank.open(path, write=True) as bank:
        put(bank, "b", 2)
    reader = before or Follower(path)
    if before is None:
        moved(saved, path)
    else:  # its log would be taken for that of the new file
        restore(saved, path, replace=True)
    with MemoryBank.open(path, write=True) as bank:
        put(bank, "y", 3)
        put(bank, "z", 4)
    assert reader.follows() == (seen == "after")


@pytest.mark.parametrize("way", ["create", "first commit", "save"])
def test_another_bank_of_the_same_name_is_another_history(folder: Path, way: str) -> None:
    for place, names in (("bank", "ab"), ("other", "xy")):
        if way == "first commit":
            bank = MemoryBank.create_on_commit(folder / place, "f00d")
        else:
            bank = MemoryBank.create(folder / place, "f00d") if way == "create" else MemoryBank("f00d")
        bank.put([Document(name, "") for name in names], torch.cat([memory(1, ord(name)) for name in names]))
        bank.commit()
        if way == "save":
            bank.save(folder / place)
        bank.close()
    reader = Follower(folder / "bank")
    moved(folder / "other", folder / "bank")
    assert reader.follows()


def test_a_reader_refuses_what_it_cannot_follow_and_stays(folder: Path) -> None:
    path = made(folder / "bank")
    reader = MemoryBank.open(path)
    moved(made(folder / "other", "xyz", "beef"), path)
    with pytest.raises(FingerprintError, match="model f00d and has been replaced by a bank of model beef"):
        reader.refresh()
    alter(path, "UPDATE document SET rows = 2")
    with pytest.raises(DamageError):
        reader.refresh()
    path.unlink()
    with pytest.raises(BankError, match="there is no memory bank"):
        reader.refresh()
    assert contents(reader) == {"a": 0, "b": 1, "c": 2}
