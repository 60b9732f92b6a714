"""A bank that overwrites what it deletes: before a file goes, its bytes are zeros."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from mac_rag.bank.storage import commit_reader, manifest, segment
from mac_rag.bank.storage.repair import repair, verify

from mac_rag.atomic_files import remove_file, write_file
from mac_rag.bank import MemoryBank
from mac_rag.bank.copies import backup, restore
from mac_rag.data.types import Document
from mac_rag.errors import BankError
from tests.bank.helpers import contents, memory
from tests.faults import faults

TEXTS = {"a": "The bridge opened.", "b": "The museum closed.", "c": "The mill burned."}


def filled(folder: Path) -> Path:
    with MemoryBank.create(folder, "f00d", keep_texts=True, secure_delete=True) as bank:
        for number, (name, text) in enumerate(TEXTS.items(), 1):
            bank.put([Document(name, text)], memory(1, number))
        bank.commit()
    return folder


class Blocks:
    """The files of a folder, kept open, as a disk keeps the blocks of a file that is unlinked."""

    def __init__(self, folder: Path) -> None:
        self.files = {file.name: file.open("rb") for file in folder.iterdir() if file.is_file()}

    def read(self) -> dict[str, bytes]:
        found = {}
        for name, file in self.files.items():
            file.seek(0)
            found[name] = file.read()
        return found


@pytest.fixture
def blocks(folder: Path) -> Iterator[list[Blocks]]:
    watched: list[Blocks] = []
    yield watched
    for seen in watched:
        for file in seen.files.values():
            file.close()


def test_compaction_overwrites_every_file_that_goes(folder: Path, blocks: list[Blocks]) -> None:
    bank = filled(folder / "bank")
    with MemoryBank.open(bank, write=True) as opened:
        blocks.append(Blocks(bank))
        opened.delete("a")
        opened.compact()
        blocks.append(Blocks(bank))
        opened.put([Document("d", "Later.")], memory(1, 4))
        opened.compact()
        kept = {file.name for file in bank.iterdir()}
    for seen in blocks:
        for name, data in seen.read().items():
            if not name.startswith("writer"):
                assert (set(data) == {0}) == (name not in kept or name.startswith("manifest")), name
    assert contents(MemoryBank.open(bank)) == {"b": 2, "c": 3, "d": 4}
    assert {file.suffix for file in bank.iterdir()} <= {".json", ".jsonl", ".safetensors", ".index", ".lock"}


def test_what_a_failed_commit_has_written_is_overwritten_too(folder: Path, blocks: list[Blocks]) -> None:
    bank = filled(folder / "bank")
    with MemoryBank.open(bank, write=True) as opened:
        opened.put([Document("x", "Secret words.")], memory(1, 9))
        opened.prepare()
        written = Blocks(bank)
        blocks.append(written)
        opened.rollback()
    left = {file.name for file in bank.iterdir()}
    gone = [data for name, data in written.read().items() if name.startswith("segment") and name not in left]
    assert len(gone) == 4
    assert all(set(data) == {0} for data in gone)
    assert b"Secret" not in b"".join(written.read().values())


def test_an_unfinished_file_is_overwritten(tmp_path: Path) -> None:
    handles = []

    def pieces() -> Iterator[bytes]:
        yield b"secret" * 100_000
        handles.append((tmp_path / "file.new").open("rb"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "file", pieces(), secure_delete=True)
    assert list(tmp_path.iterdir()) == []
    [handle] = handles
    with handle:
        assert b"secret" not in handle.read()


def test_readers_and_snapshots_keep_what_they_have_read(folder: Path) -> None:
    bank = filled(folder / "bank")
    reader = MemoryBank.open(bank)
    with MemoryBank.open(bank, write=True) as opened:
        snapshot = opened.snapshot()
        opened.delete("a")
        opened.compact()
        for seen in (reader, snapshot):  # whose files are zeros now
            assert contents(seen) == {"a": 1, "b": 2, "c": 3}
            assert {entry.document_id: entry.texts[0] for entry in seen} == TEXTS
        opened.put([Document("a", "Again.")], memory(1, 7))
        opened.compact()
        before = opened.snapshot()
        opened.put([Document(f"d{index}", "") for index in range(5)], memory(5, 8))
        opened.compact()
        assert contents(before) == {"b": 2, "c": 3, "a": 7}  # of a segment that this very process has written
    assert reader.refresh()
    assert len(reader) == 8


def test_a_reader_that_meets_zeros_reads_the_next_commit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = filled(folder / "bank")
    read, writes = segment.read_segment, []

    def overtaken(*arguments: object, **options: object) -> object:
        """Reads a segment after a writer has replaced it, and overwritten it, and not unlinked it yet."""
        if not writes:
            writes.append(1)
            with monkeypatch.context() as patch:
                patch.setattr(Path, "unlink", lambda *_, **__: None)
                with MemoryBank.open(bank, write=True) as opened:
                    opened.delete("a")
                    opened.compact()
        return read(*arguments, **options)

    monkeypatch.setattr(commit_reader, "read_segment", overtaken)
    assert contents(MemoryBank.open(bank)) == {"b": 2, "c": 3}
    monkeypatch.undo()
    with MemoryBank.open(bank, write=True):
        pass
    assert not list(bank.glob("*.replaced"))
    assert verify(bank).clean


def test_a_manifest_that_is_overwritten_while_it_is_read_is_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = filled(folder / "bank")
    plain, reads = manifest.read_text_bytes, []

    def overtaken(path: Path, limit: int) -> bytes:
        data = plain(path, limit)
        reads.append(path)
        if len(reads) > 1:
            return data
        write_file(path, [data], secure_delete=True)
        return bytes(len(data))

    monkeypatch.setattr(manifest, "read_text_bytes", overtaken)
    assert manifest.read_manifest(bank / "manifest.json").secure_delete
    assert len(reads) == 2


@pytest.mark.parametrize("keep_texts", [False, True])
def test_a_bank_knows_its_settings(folder: Path, keep_texts: bool) -> None:
    for secure_delete in (False, True):
        place = folder / str(secure_delete)
        MemoryBank.create(place, "f00d", keep_texts=keep_texts, secure_delete=secure_delete).close()
        opened = MemoryBank.open(place)
        assert (opened.keep_texts, opened.secure_delete) == (keep_texts, secure_delete)


def test_copies_of_a_bank_overwrite_as_well(folder: Path) -> None:
    bank = filled(folder / "bank")
    backup(bank, folder / "saved")
    restore(folder / "saved", folder / "back")
    with MemoryBank.open(bank) as opened:
        opened.save(folder / "copy")
    repair(bank, folder / "repaired")
    for name in ("saved", "back", "copy", "repaired"):
        assert MemoryBank.open(folder / name).secure_delete, name
    MemoryBank.create(folder / "plain", "f00d", keep_texts=True).close()
    with pytest.raises(BankError, match=r"saved overwrites what it deletes and .*plain does not"):
        restore(folder / "saved", folder / "plain", replace=True)


def test_files_that_have_another_name_are_not_overwritten(folder: Path) -> None:
    bank = filled(folder / "bank")
    (folder / "linked").mkdir()
    for file in bank.iterdir():
        (folder / "linked" / file.name).hardlink_to(file)
    with MemoryBank.open(bank, write=True) as opened:
        opened.delete("a")
        opened.compact()
    assert contents(MemoryBank.open(folder / "linked")) == {"a": 1, "b": 2, "c": 3}
    assert verify(folder / "linked").clean
    (folder / "target").write_bytes(b"not mine")
    (folder / "link").symlink_to(folder / "target")
    remove_file(folder / "link", secure_delete=True)
    assert (folder / "target").read_bytes() == b"not mine"


def test_a_repair_keeps_what_it_drops(folder: Path) -> None:
    bank = filled(folder / "bank")
    [tokens] = bank.glob("segment-*.safetensors")
    damaged = tokens.read_bytes()[:-1] + b"\1"
    tokens.write_bytes(damaged)
    report = repair(bank)
    assert report.lost == ("c",)
    assert report.quarantine is not None
    assert (report.quarantine / tokens.name).read_bytes() == damaged
    assert MemoryBank.open(bank).secure_delete


@pytest.mark.parametrize("call", ["write", "fsync", "unlink"])
def test_a_file_that_cannot_be_overwritten_goes_with_the_next_compaction(folder: Path, call: str) -> None:
    bank = filled(folder / "bank")
    with MemoryBank.open(bank, write=True) as opened, faults(bank) as fault:
        opened.delete("a")
        opened.commit()
        tidy = opened._store.tidy  # type: ignore[union-attr]

        def failing() -> OSError | None:
            fault._fails = lambda number, name: OSError(errno.EIO, os.strerror(errno.EIO)) if name == call else None
            error = tidy()
            fault.heal()
            return error

        opened._store.tidy = failing  # type: ignore[union-attr, method-assign]
        before = {file.name for file in bank.iterdir()}
        with pytest.raises(BankError, match=r"is rewritten, but an old file cannot be removed.*compact it again"):
            opened.compact()
        assert {name for name in before if name.startswith("segment")} < {file.name for file in bank.iterdir()}
        assert contents(MemoryBank.open(bank)) == contents(opened) == {"b": 2, "c": 3}  # it is committed
        assert verify(bank).clean
        opened._store.tidy = tidy  # type: ignore[union-attr, method-assign]
        opened.compact()
    assert b"bridge" not in b"".join(file.read_bytes() for file in bank.iterdir())
    assert len(list(bank.glob("segment-*"))) == 4
