"""The bank on disk: who may open it, what it refuses, and what it leaves behind."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from mac_rag.bank.storage.manifest import FORMERS
from mac_rag.bank.storage.repair import repair, verify
from safetensors import safe_open

from mac_rag.atomic_files import sealed
from mac_rag.bank import MemoryBank
from mac_rag.data.types import Document
from mac_rag.errors import BankError, FingerprintError
from tests.bank.helpers import contents, memory
from tests.faults import faults


def made(folder: Path, *names: str) -> MemoryBank:
    bank = MemoryBank.create(folder, "f00d")
    for number, name in enumerate(names):
        bank.put([Document(name, f"text of {name}")], memory(1, number))
    bank.commit()
    return bank


def test_one_writer_at_a_time(folder: Path) -> None:
    bank = made(folder, "a")
    for refused in (lambda: MemoryBank.open(folder, write=True), lambda: repair(folder)):
        with pytest.raises(BankError, match=rf"open for writing in process {os.getpid()} on .* since 20.*; wait"):
            refused()
    (folder / "writer.json").write_text("{")
    with pytest.raises(BankError, match="open for writing in another process"):
        MemoryBank.open(folder, write=True)
    assert MemoryBank.open(folder).document_ids == ["a"]
    bank.close()
    bank.close()
    with MemoryBank.open(folder, write=True), pytest.raises(BankError, match="in process"):
        MemoryBank.open(folder, write=True)
    with pytest.raises(FingerprintError):  # a writer that is refused is none
        MemoryBank.open(folder, write=True, fingerprint="beef")
    MemoryBank.open(folder, write=True).close()


def test_a_bank_for_reading_cannot_be_changed(folder: Path) -> None:
    made(folder, "a", "b").close()
    reader = MemoryBank.open(folder)
    for change in (
        lambda: reader.put([Document("c", "")], memory(1)),
        lambda: reader.delete("a"),
        lambda: reader.merge(["a", "b"], memory(1)),
        reader.commit,
        reader.compact,
    ):
        with pytest.raises(BankError, match="not open for writing"):
            change()
    assert contents(reader) == {"a": 0.0, "b": 1.0}


def test_new_banks(folder: Path) -> None:
    assert not MemoryBank.exists(folder / "new" / "bank")
    made(folder / "new" / "bank", "a").close()
    assert MemoryBank.exists(folder / "new" / "bank")
    assert not MemoryBank.exists(folder)
    for again in (lambda: made(folder / "new" / "bank"), lambda: MemoryBank("f00d").save(folder / "new" / "bank")):
        with pytest.raises(BankError, match="already holds a memory bank"):
            again()
    assert contents(MemoryBank.open(folder / "new" / "bank")) == {"a": 0.0}
    for look in (MemoryBank.open, verify, repair):
        with pytest.raises(BankError, match="no memory bank in"):
            look(folder / "nowhere")
    assert not (folder / "nowhere").exists()
    (folder / "file").touch()
    with pytest.raises(BankError, match=r"file/bank cannot be written to: .*Not a directory"):
        MemoryBank.create(folder / "file" / "bank", "f00d")


def test_what_was_never_committed_is_forgotten(folder: Path) -> None:
    with made(folder, "a", "b") as bank:
        bank.delete("a")
        bank.put([Document("c", "")], memory(1))
    assert not bank.refresh()
    assert bank.document_ids == ["b", "c"]  # it can still be used as it was
    assert contents(MemoryBank.open(folder)) == {"a": 0.0, "b": 1.0}


def test_a_lost_manifest_is_no_empty_bank(folder: Path) -> None:
    made(folder, "a").close()
    (folder / "manifest.json").unlink()
    assert MemoryBank.exists(folder)
    with pytest.raises(BankError, match=r"manifest.json is missing; repair"):
        MemoryBank.open(folder)
    with pytest.raises(BankError, match="already holds a memory bank"):
        MemoryBank.create(folder, "f00d")
    repair(folder)
    assert contents(MemoryBank.open(folder)) == {"a": 0.0}


def test_deleted_bytes_are_gone_after_compaction(folder: Path) -> None:
    tokens = torch.rand(1, 4, 16)
    traces = [tokens.numpy().tobytes(), b"secret id", b"secret metadata"]
    with made(folder, *(f"document {index}" for index in range(20))) as bank:
        bank.delete("document 3")
        keys = bank.row_keys.tolist()
    with MemoryBank.create(folder / "wide", "f00d") as bank:
        bank.put([Document("secret id", "", {"note": "secret metadata"})], tokens)
        bank.put([Document("other", "")], torch.rand(1, 4, 16))
        bank.commit()
        reader = MemoryBank.open(folder / "wide")
        bank.delete("secret id")
        bank.commit()
        assert all(any(trace in data for data in everything(folder / "wide")) for trace in traces)
        bank.compact()
        assert not any(trace in data for data in everything(folder / "wide") for trace in traces)
        assert reader.document_ids == ["secret id", "other"]  # as long as it does not refresh
        assert torch.equal(reader["secret id"].phi, tokens)
        assert reader.refresh()
        assert reader.document_ids == ["other"]
    with MemoryBank.open(folder, write=True) as bank:
        assert bank.document_ids.count("document 3") == 1  # that deletion was never committed
        bank.delete("document 3")
        bank.compact()
        assert bank.row_keys.tolist() == keys


def everything(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in folder.iterdir()]


def test_files_of_others_stay_and_remains_of_a_crash_go(folder: Path) -> None:
    made(folder, "a").close()
    others = ["notes.txt", "segment-1.safetensors", "segment-0123456789abcdef.json", "model.safetensors", "x.new"]
    remains = ["segment-0123456789abcdef.safetensors", "segment-0123456789abcdef.jsonl.new", "manifest.json.new"]
    for name in others + remains:
        (folder / name).write_text("something")
    assert verify(folder).clean
    assert MemoryBank.open(folder).document_ids == ["a"]
    assert all((folder / name).exists() for name in remains)  # a reader removes nothing
    MemoryBank.open(folder, write=True).close()
    assert all((folder / name).exists() for name in others)
    assert not any((folder / name).exists() for name in remains)


def test_what_the_disk_refuses_can_be_committed_later(folder: Path) -> None:
    bank = made(folder, "a", "b")
    bank.put([Document("c", "")], memory(1, 2))
    bank.delete("a")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        for write in (bank.commit, lambda: bank.save(folder / "copy")):
            with pytest.raises(BankError, match=r"cannot be written to: .*File too large"):
                write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert contents(bank) == {"b": 1.0, "c": 2.0}
    assert contents(MemoryBank.open(folder)) == {"a": 0.0, "b": 1.0}
    assert not MemoryBank.exists(folder / "copy")
    bank.save(folder / "copy")
    assert contents(MemoryBank.open(folder / "copy")) == {"b": 1.0, "c": 2.0}
    bank.commit()
    assert contents(MemoryBank.open(folder)) == {"b": 1.0, "c": 2.0}
    assert not list(folder.glob("*.new"))


def test_a_full_disk_leaves_a_bank_that_opens(folder: Path) -> None:
    """Also while it is still full, and if the commit that failed needs no new segment."""
    made(folder, "a", "b").close()
    files = {file.name for file in folder.iterdir()}
    syncs = 0
    for number in range(1, 100):
        with faults(folder) as fault, MemoryBank.open(folder, write=True) as bank:
            bank.delete("a")
            before = len(fault.calls)
            fault.full(before + number)
            try:
                bank.commit()
                break
            except BankError:
                bank.rollback()
            syncs += fault.failed == "fsync"
        assert verify(folder).clean, fault.failed
        assert contents(MemoryBank.open(folder)) == {"a": 0.0, "b": 1.0}
        assert {file.name for file in folder.iterdir()} <= files.union(FORMERS)
        MemoryBank.open(folder, write=True).close()
        assert {file.name for file in folder.iterdir()} == files
    assert syncs > 4


def test_rows_that_rot_are_not_copied(folder: Path) -> None:
    """A segment is checked when it is opened, and each entry again when it is copied into another segment."""
    bank = made(folder, "a", "b")
    (tokens,) = folder.glob("*.safetensors")
    with tokens.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x77")
    bank.delete("a")
    with pytest.raises(BankError, match=rf"{tokens.name} is damaged: the memory tokens of 'b'"):
        bank.compact()
    with pytest.raises(BankError, match=str(tokens)):
        bank.save(folder / "copy")
    assert not MemoryBank.exists(folder / "copy")
    assert verify(folder).lost == ("b",)


def test_a_segment_is_a_safetensors_file(folder: Path) -> None:
    phi = torch.rand(3, 2, 5)
    with MemoryBank.create(folder, "f00d") as bank:
        bank.put([Document("a", ""), Document("b", "")], phi, [2, 1])
        bank.commit()
    (path,) = folder.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("phi"), phi)
        assert json.loads(file.metadata()["entries"]) == [[0, ["a"]], [1, ["b"]]]


def test_reading_does_not_load_the_bank(folder: Path) -> None:
    """Rows stay on the disk until they are used, so a bank may be larger than memory."""
    with MemoryBank.create(folder, "f00d") as bank:
        bank.put([Document(str(index), "") for index in range(200)], torch.rand(200, 64, 256))
        bank.commit()
    size = 200 * 64 * 256 * 4
    before = private_bytes()
    reader = MemoryBank.open(folder)
    total = sum(float(reader.read(start, start + 1).sum()) for start in range(200))
    entries = [entry.document_id for entry in reader]
    assert (len(entries), total > 0) == (200, True)
    gc.collect()
    assert private_bytes() - before < size / 10


def private_bytes() -> int:
    """Memory of this process that is in no file."""
    status = Path("/proc/self/status").read_text().split("RssAnon:")[1]
    return int(status.split()[0]) * 1024


@pytest.mark.parametrize("copied", [False, True])
def test_other_formats(folder: Path, copied: bool) -> None:
    made(folder, "a").close()
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    for version in (2, 4, 6, "5"):
        for name in ("manifest.json", "manifest.copy.json") if copied else ("manifest.json",):
            (folder / name).write_bytes(sealed({**manifest, "format": version}))
        before = everything(folder)
        for look in (MemoryBank.open, lambda where: MemoryBank.open(where, write=True), verify, repair):
            with pytest.raises(BankError, match=f"format {version!r}, .* reads format 5; .*adapt .* again"):
                look(folder)
        assert sorted(everything(folder)) == sorted([*before])


@pytest.mark.parametrize(
    "change", [{"segments": [{"name": "../../etc/passwd"}]}, {"generation": -1}, {"codebook": "../x"}, {"more": 1}]
)
def test_manifests_that_nobody_wrote(folder: Path, change: dict[str, object]) -> None:
    made(folder, "a").close()
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    for data in (sealed({**manifest, **change}), json.dumps({**manifest, **change}).encode(), b"[]", b"{", b""):
        (folder / "manifest.json").write_bytes(data)
        with pytest.raises(BankError, match=r"manifest.json is damaged"):
            MemoryBank.open(folder)
