"""Banks, their backups and quarantines can be read by their user only."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from mac_rag.bank.storage.repair import repair

from mac_rag.bank import MemoryBank
from mac_rag.bank.copies import backup
from mac_rag.data.types import Document
from tests.bank.helpers import memory

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX's")


@pytest.fixture(autouse=True)
def _umask() -> object:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> set[int]:
    """The modes of all files and folders below a folder, and of the folder itself."""
    return {stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.rglob("*"))}


def test_a_bank_its_backup_and_its_quarantine_are_private(folder: Path) -> None:
    place = folder / "banks" / "bank"
    with MemoryBank.create(place, "f00d", keep_texts=True) as bank:
        bank.put([Document("a", "first"), Document("b", "second")], memory(2))
        bank.commit()
        assert modes(folder / "banks") == {0o700, 0o600}  # while the lock is held, too
    backup(place, folder / "saved")
    [texts] = place.glob("*.texts.jsonl")
    texts.write_bytes(texts.read_bytes()[:-5])
    assert repair(place).quarantine is not None
    assert modes(folder / "banks") == modes(folder / "saved") == {0o700, 0o600}


def test_a_folder_that_was_there_keeps_its_mode(folder: Path) -> None:
    (folder / "bank").mkdir()
    (folder / "bank").chmod(0o750)
    with MemoryBank.create(folder / "bank", "f00d") as bank:
        bank.put([Document("a", "first")], memory(1))
        bank.commit()
    assert modes(folder / "bank") == {0o750, 0o600}
