"""Repair throws nothing away, an older manifest destroys nothing, and backups are whole whatever the writer does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from mac_rag.bank.storage import repair as repairing
from mac_rag.bank.storage.manifest import MANIFEST, MANIFEST_COPY, Intent, read_manifest
from mac_rag.bank.storage.model_name import read_model_name, write_model_name
from mac_rag.bank.storage.repair import repair, verify
from mac_rag.bank.storage.store import Store

from mac_rag.bank import MemoryBank
from mac_rag.bank.copies import backup, restore
from mac_rag.errors import BankError, DamageError, FingerprintError
from tests.bank.helpers import change, contents, memory, put
from tests.faults import faults


def filled(place: Path, names: str = "abcdef") -> dict[str, float]:
    with MemoryBank.create(place, "f00d") as bank:
        for number, name in enumerate(names):
            put(bank, name, number)
        return contents(bank)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


@pytest.mark.parametrize("behind", [1, 2, 4])
def test_an_older_manifest_destroys_nothing(folder: Path, behind: int) -> None:
    place = folder / "bank"
    older = {}
    with MemoryBank.create(place, "f00d") as bank:
        for number, name in enumerate("abcdef"):
            older[number] = (place / MANIFEST).read_bytes()
            put(bank, name, number)
        expected = contents(bank)
        newest = (place / MANIFEST).read_bytes()
    (place / MANIFEST).write_bytes(older[6 - behind])
    for write in (False, True):
        with pytest.raises(DamageError, match="older manifest was put in the place of the newest"):
            MemoryBank.open(place, write=write)
    assert not verify(place).clean
    assert not repair(place).lost
    MemoryBank.open(place, write=True).close()
    assert contents(MemoryBank.open(place)) == expected
    assert verify(place).clean
    # A killed writer leaves the same files, and a note that it was there.
    (place / MANIFEST).write_bytes(older[5])
    (place / MANIFEST_COPY).write_bytes(newest)
    (place / "writer.json").write_bytes(b"{}")
    assert verify(place).clean


def test_what_a_repair_drops_is_kept(folder: Path) -> None:
    place = folder / "bank"
    expected = filled(place, "abcdefg")
    [large, *_] = sorted(place.glob("segment-*.safetensors"), key=lambda file: -file.stat().st_size)
    damaged = bytearray(large.read_bytes())
    damaged[-1] ^= 1
    large.write_bytes(damaged)
    report = repair(place)
    assert len(report.lost) == 1
    del expected[report.lost[0]]
    assert contents(MemoryBank.open(place)) == expected
    assert report.quarantine is not None
    assert (report.quarantine / large.name).read_bytes() == damaged
    assert json.loads((report.quarantine / "report.json").read_text())["lost"] == list(report.lost)
    assert str(report.quarantine) in str(report)
    assert report.lost[0] in (report.quarantine / "report.txt").read_text()
    # What it dropped still can be opened by who knows how: the quarantine is a bank, with the damage.
    assert verify(report.quarantine).lost == report.lost
    # It stays, whatever is done to the bank later, and a second repair has nothing to do.
    with MemoryBank.open(place, write=True) as bank:
        put(bank, "z", 9)
        bank.compact()
    assert (report.quarantine / large.name).exists()
    assert repair(place).clean
    assert len(list((place / "quarantine").iterdir())) == 1


@pytest.mark.parametrize("dangling", [False, True])
def test_a_quarantine_that_is_a_link_is_not_followed(folder: Path, dangling: bool) -> None:
    place, elsewhere = folder / "bank", folder / "elsewhere"
    expected = filled(place)
    (place / MANIFEST).write_bytes(b"{}")
    if not dangling:
        elsewhere.mkdir()
    (place / "quarantine").symlink_to(elsewhere)
    before = {file.name: file.read_bytes() for file in place.glob("*.*")}
    with pytest.raises(BankError, match=r"quarantine is a symbolic link.* or repair into a new folder"):
        repair(place)
    assert {file.name: file.read_bytes() for file in place.glob("*.*")} == before
    assert not list(elsewhere.glob("*"))
    (place / "quarantine").unlink()
    assert not repair(place).lost
    assert contents(MemoryBank.open(place)) == expected


def test_repair_into_a_new_bank_leaves_the_old_one(folder: Path) -> None:
    place, new = folder / "bank", folder / "new"
    with MemoryBank.create(place, "f00d") as bank:
        put(bank, "a", 1)
        put(bank, "b", 1)
        bank.commit(Intent(puts=("c",)))
    write_model_name(place, "f00d", "a model")
    (place / MANIFEST).write_bytes(b"{}")
    before = {file.name: file.read_bytes() for file in place.iterdir() if file.is_file()}
    report = repair(place, new)
    assert not report.clean
    assert not report.lost
    assert {file.name: file.read_bytes() for file in place.iterdir() if file.is_file()} == before
    made = MemoryBank.open(new)
    assert made.document_ids == ["a", "b"]
    assert made.intent.puts == ("c",)
    assert verify(new).clean
    assert read_model_name(new, "f00d") == "a model"
    with pytest.raises(BankError, match="already holds a memory bank"):
        repair(place, new)


@pytest.mark.parametrize(("first", "what"), list(enumerate(["add", "merge segments", "delete", "compact"], 1)))
def test_a_repair_that_fails_can_be_repeated(folder: Path, first: int, what: str) -> None:
    """Whichever call fails, the next repair keeps as much; each change tries another quarter of the calls."""
    original = folder / "original"
    filled(original)
    change(original, what)
    [file, *_] = sorted(original.glob("segment-*.jsonl"), key=lambda file: -file.stat().st_size)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:-1], lines[-1][:-3] + b"x}\n"]))
    shutil.copytree(original, folder / "expected")
    kept = repair(folder / "expected")
    for number in range(first, 400, 4):
        place = folder / "bank"
        shutil.copytree(original, place)
        with faults(place) as fault:
            fault.at(number)
            try:
                repair(place)
            except BankError:
                fault.heal()
        repair(place)
        assert contents(MemoryBank.open(place)) == contents(MemoryBank.open(folder / "expected")), fault.failed
        shutil.rmtree(place)
        if fault.failed is None:
            assert number > 20
            assert len(kept.lost) == 1
            return
    pytest.fail("it never came to an end")


def test_a_backup_while_the_writer_commits_and_compacts(folder: Path) -> None:
    place = folder / "bank"
    filled(place)
    with MemoryBank.open(place, write=True) as bank:
        source = Store.open(place, write=False)
        put(bank, "g", 7)
        bank.delete("a")
        bank.compact()  # the segments of `source` are gone
        assert backup(place, folder / "after") == 6
    MemoryBank.open(folder / "after")
    assert [segment.name for segment in source.segments] != []
    assert contents(MemoryBank.open(folder / "after")) == {"b": 1, "c": 2, "d": 3, "e": 4, "f": 5, "g": 7}
    with pytest.raises(BankError, match="is not empty"):
        backup(place, folder / "after")


def test_a_backup_copies_no_damage(folder: Path) -> None:
    place = folder / "bank"
    filled(place)
    [file, *_] = place.glob("segment-*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\7")
    with pytest.raises(DamageError):
        backup(place, folder / "backup")
    assert not (folder / "backup").exists()


def test_a_backup_is_put_back_and_readers_go_on(folder: Path) -> None:
    place, saved = folder / "bank", folder / "backup"
    expected = filled(place)
    backup(place, saved)
    with MemoryBank.open(place, write=True) as bank:
        bank.delete("b")
        put(bank, "g", 7)
    reader = MemoryBank.open(place)
    history, generation = reader.history, read_manifest(place / MANIFEST).generation
    with pytest.raises(BankError, match="is not empty"):
        restore(saved, place)
    assert restore(saved, place, replace=True) == 6
    assert read_manifest(place / MANIFEST).generation > generation
    assert reader.refresh()
    assert contents(reader) == expected
    assert reader.history > history
    assert verify(place).clean
    # New entries get numbers that nobody has seen.
    with MemoryBank.open(place, write=True) as bank:
        put(bank, "h", 8)
        assert bank["h"].sequence > 6
    assert restore(saved, folder / "new") == 6
    assert contents(MemoryBank.open(folder / "new")) == expected


def test_a_backup_of_another_bank_is_not_put_back(folder: Path) -> None:
    filled(folder / "bank")
    MemoryBank.create(folder / "model", "beef").close()
    with pytest.raises(FingerprintError, match="restore it into a new folder"):
        restore(folder / "model", folder / "bank", replace=True)
    assert len(MemoryBank.open(folder / "bank")) == 6


def test_a_restore_that_fails_leaves_the_bank(folder: Path) -> None:
    saved = folder / "backup"
    expected = filled(folder / "original")
    backup(folder / "original", saved)
    with MemoryBank.open(folder / "original", write=True) as bank:
        bank.put([], memory(0))
        bank.delete("a")
        put(bank, "z", 9)
        before = contents(bank)
    for number in range(1, 400, 3):  # `make torture` fails every call
        place = folder / "bank"
        shutil.copytree(folder / "original", place)
        with faults(place) as fault:
            fault.full(number)
            try:
                restore(saved, place, replace=True)
                done = True
            except BankError:
                done = False
            fault.heal()
        assert contents(MemoryBank.open(place)) == (expected if done else before), fault.failed
        assert verify(place).clean
        restore(saved, place, replace=True)
        assert contents(MemoryBank.open(place)) == expected
        shutil.rmtree(place)
        if fault.failed is None:
            return
    pytest.fail("it never came to an end")


def test_the_copy_of_the_manifest_is_never_needed_to_read(folder: Path) -> None:
    place = folder / "bank"
    expected = filled(place)
    (place / MANIFEST_COPY).write_bytes(b"nonsense")
    assert contents(MemoryBank.open(place)) == expected
    MemoryBank.open(place, write=True).close()
    assert (place / MANIFEST_COPY).read_bytes() == (place / MANIFEST).read_bytes()


def test_a_bank_is_verified_in_one_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(folder / "bank")
    passes = []
    read = repairing.read_segment
    monkeypatch.setattr(repairing, "read_segment", lambda *a, **b: passes.append(1) or read(*a, **b))
    assert verify(folder / "bank").clean
    assert len(passes) == len(read_manifest(folder / "bank" / MANIFEST).segments)


def test_a_folder_in_the_place_of_a_file_is_nobodys_to_remove(tmp_path: Path) -> None:
    place = tmp_path / "bank"
    with MemoryBank.create(place, "f00d") as bank:
        for number, name in enumerate("abc"):
            put(bank, name, number)
    path = min(place.glob("segment-*.safetensors"), key=lambda file: file.stat().st_size)
    path.unlink()
    path.mkdir()
    (path / "note").write_text("not a segment")
    assert repair(place).lost
    with MemoryBank.open(place, write=True) as bank:
        bank.delete(bank.document_ids[0])
        bank.compact()
    assert (path / "note").exists()
    assert verify(place).clean
