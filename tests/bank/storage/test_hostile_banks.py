"""Banks whose checksums fit and whose content cannot be true: each is refused by name, and repaired."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mac_rag.bank.storage.folder import is_vacant
from mac_rag.bank.storage.repair import repair, verify

from mac_rag.atomic_files import sealed
from mac_rag.bank import MemoryBank
from mac_rag.bank.bank import BankEntry
from mac_rag.bank.copies import restore
from mac_rag.data.provenance import Member
from mac_rag.data.types import Document
from mac_rag.errors import BankError, DamageError
from mac_rag.untrusted_files import METADATA_DEPTH
from tests.faults import faults
from tests.torture import banks
from tests.torture.mutations import little_memory, replace_file

WHOLE = ["b", "c", "f", "g", "h", "a", "e", "i", "j"]


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    return banks.make(tmp_path)[0]


def refused(folder: Path, message: str) -> None:
    """It is refused in little memory, by whoever opens it or reads its records."""
    for write in (False, True):
        with (
            little_memory(),
            pytest.raises(BankError, match=message) as error,
            MemoryBank.open(folder, write=write) as bank,
        ):
            bank.document_ids  # noqa: B018
        assert str(folder) in str(error.value)


def manifest_of(folder: Path) -> dict[str, Any]:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["sha256"]
    return manifest


def largest(manifest: dict[str, Any]) -> dict[str, Any]:
    return max(manifest["segments"], key=lambda segment: segment["entries"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: largest(m).update(shape=[-1, 2, 3]), "manifest.json is damaged: .*shape"),
        (lambda m: largest(m).update(shape=[1 << 40, 1 << 40, 1 << 40]), "are larger than any segment"),
        (
            lambda m: largest(m).update(shape=[1 << 20, 2, 3]),
            "index is damaged: starts are not the sums of counts",
        ),
        (lambda m: largest(m).update(offset=8), "manifest.json is damaged: .*offset"),
        (lambda m: largest(m).update(offset=largest(m)["offset"] - 8), "safetensors is damaged: it has"),
        (lambda m: largest(m).update(tombstones=[1 << 30]), "entries were deleted that it never had"),
        (lambda m: largest(m).update(tombstones=[3, 3]), "each entry deleted once"),
        (lambda m: largest(m).update(tombstones=[-1]), "manifest.json is damaged: .*tombstones"),
        (lambda m: largest(m).update(entries=0), "manifest.json is damaged: .*entries"),
        (lambda m: largest(m).update(entries=7), r"index is damaged: sequences are \[8\] in torch.int64, not \[7\]"),
        (lambda m: largest(m).update(name="../../etc/passwd"), "manifest.json is damaged: .*name"),
        (lambda m: m["segments"].append(m["segments"][0]), "a segment comes twice"),
        (lambda m: m["segments"].reverse(), "contradicts itself: sequence number 8 comes after 10"),
        (lambda m: m.update(next_sequence=1), "contradicts itself: sequence number 1 is not below 1"),
        (lambda m: m.update(next_sequence=1 << 80), "manifest.json is damaged: next_sequence"),
        (lambda m: m.update(generation=-1), "manifest.json is damaged: generation"),
        (lambda m: m.update(codebook="0" * 64), "it has codebooks, and its rows are not kept as pq"),
        (lambda m: m.update(intent={"puts": [[]]}), "manifest.json is damaged: intent"),
        (lambda m: m.update(format=[9] * 100), r"has format \[9, 9.{,60}, and this version"),
    ],
)
def test_manifests(bank: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    manifest = manifest_of(bank)
    change(manifest)
    banks.write_manifest(bank, sealed(manifest))
    refused(bank, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "not JSON|nested more than"),
        ('{"format": 5, "a": ' + '{"a":' * 100_000 + "1" + "}" * 100_001, "nested more than"),
        ('{"format": 5, "generation": ' + "9" * 5_000 + "}", "a number of 5,000 digits"),
        ('{"format": 5, "generation": NaN}', "NaN is not JSON"),
        ('{"format": 5, "format": 5}', "'format' comes twice"),
        ("\0" * 100, "byte 0 is NUL"),
    ],
    ids="lists objects digits nan twice nul".split(),
)
def test_manifests_that_are_no_json(bank: Path, text: str, message: str) -> None:
    banks.write_manifest(bank, text.encode())
    refused(bank, f"manifest.json is damaged: .*({message})")


@pytest.mark.parametrize(
    ("change", "message", "lost"),
    [
        (lambda r: r.update(rows=-1), "line 2: its number of rows is -1", ["b"]),
        (lambda r: r.update(rows=1 << 16), "line 2: its number of rows is 65536", ["b"]),
        (lambda r: r.update(sequence=1 << 47), "line 2: its sequence number", ["b"]),
        (lambda r: r.update(sequence=True), "line 2: its sequence number is True", ["b"]),
        (lambda r: r.update(sequence=0), "line 2: it does not say what the index says", ["b"]),
        (lambda r: r.update(start=0), "line 2: it does not say what the index says", ["b"]),
        (lambda r: r.update(start=1 << 40), "line 2: it does not say what the index says", ["b"]),
        (lambda r: r.update(members=[]), "line 2: it stands for no document", ["b"]),
        (lambda r: r["members"][0].update(metadata=[]), "line 2: the document 'b'", ["b"]),
        (lambda r: r["members"][0].pop("added"), "line 2: .* other fields", ["b"]),
        (lambda r: r["members"][0].update(document_id="c"), "document 'c' comes twice", None),
        (lambda r: r["members"].append(r["members"][0]), "document 'b' comes twice", ["b"]),
        (lambda r: r.update(tokens="0"), "line 2: its checksum", ["b"]),
    ],
)
def test_records(bank: Path, change: Callable[[dict[str, Any]], object], message: str, lost: list[str] | None) -> None:
    manifest = manifest_of(bank)
    segment = largest(manifest)
    lines = (bank / f"{segment['name']}.jsonl").read_bytes().splitlines()
    record = json.loads(lines[1])
    del record["sha256"]
    change(record)
    lines[1] = sealed(record)
    banks.write(bank, manifest, segment, "records", b"".join(line + b"\n" for line in lines))
    refused(bank, message)
    report = repair(bank)
    if lost is not None:
        assert list(report.lost) == lost
        assert set(MemoryBank.open(bank).document_ids) == set(WHOLE) - set(lost)
    assert report.damage
    assert verify(bank).clean


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite(bank: Path, number: float) -> None:
    write_number(bank, struct.pack("<f", number))
    with MemoryBank.open(bank, write=True) as opened, pytest.raises(DamageError, match="memory token is not finite"):
        opened["b"].phi  # noqa: B018
    assert all(opened[name].phi.isfinite().all() for name in WHOLE if name != "b")
    assert list(repair(bank).lost) == ["b"]
    assert verify(bank).clean


def write_number(folder: Path, number: bytes) -> None:
    """Writes a number into the first row of document b, with checksums that fit."""
    manifest = manifest_of(folder)
    segment = largest(manifest)
    data = (folder / f"{segment['name']}.safetensors").read_bytes()
    width = (len(data) - segment["offset"]) // segment["shape"][0]
    place = segment["offset"] + width
    banks.write_tokens(folder, manifest, segment, data[:place] + number + data[place + 4 :])


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "hole"])
@pytest.mark.parametrize("suffix", ["jsonl", "safetensors"])
def test_files_that_are_something_else(bank: Path, suffix: str, kind: str) -> None:
    path = bank / f"{largest(manifest_of(bank))['name']}.{suffix}"
    replace_file(path, kind)
    refused(bank, f"{path.name} is damaged: ")
    assert any(path.name in message for message in verify(bank).damage)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_enter_no_bank(value: float) -> None:
    phi = torch.zeros(3, 2, 3)
    phi[1, 0, 2] = value
    bank = MemoryBank("f00d")
    with pytest.raises(BankError, match="row 1 of 3 rows of memory tokens"):
        bank.put([Document(name, name) for name in "abc"], phi)
    bank.put([Document(name, name) for name in "abc"], torch.zeros(3, 2, 3))
    with pytest.raises(BankError, match="not finite"):
        bank.merge(["a", "b"], phi[1:2])
    entry = BankEntry((Member.of(Document("a", "a")),), 0, 3, lambda: phi, lambda: (None,))
    with pytest.raises(BankError, match="not finite"):
        MemoryBank("f00d").restore([entry])
    assert bank.document_ids == ["a", "b", "c"]


def test_metadata_is_refused_where_it_could_not_be_read_again(tmp_path: Path) -> None:
    def nested(levels: int) -> Any:
        return {"a": nested(levels - 1)} if levels else 1

    with MemoryBank.create(tmp_path, "f00d") as bank:
        bank.put([Document("deepest", "", nested(METADATA_DEPTH))], torch.zeros(1, 2, 3))
        for metadata in (nested(METADATA_DEPTH + 1), {"a": 10**5_000}, {"a": float("nan")}):
            with pytest.raises(BankError, match="metadata of document 'b' cannot be kept as JSON"):
                bank.put([Document("b", "", metadata)], torch.zeros(1, 2, 3))
        bank.commit()
    assert MemoryBank.open(tmp_path)["deepest"].metadata == nested(METADATA_DEPTH)


@pytest.mark.parametrize("kind", ["file", "pipe", "loop", "name"])
def test_what_is_no_folder_is_no_bank_and_said_to_be_none(tmp_path: Path, kind: str) -> None:
    place = tmp_path / ("a\0b" if kind == "name" else "place")
    if kind == "file":
        place.write_bytes(b"")
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "loop":
        place.symlink_to(place)
    MemoryBank.create(tmp_path / "bank", "f00d").close()
    for use in (
        MemoryBank.exists, is_vacant, MemoryBank.open, verify, repair, lambda place: restore(tmp_path / "bank", place),
    ):  # fmt: skip
        with pytest.raises(BankError, match="cannot be read as the folder of a memory bank"):
            use(place)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_a_bank_with_something_else_in_the_place_of_its_manifest_is_there(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "bank"
    MemoryBank.create(place, "f00d").close()
    manifest = place / "manifest.json"
    manifest.rename(tmp_path / "elsewhere")
    if kind == "pipe":
        os.mkfifo(manifest)
    elif kind == "folder":
        manifest.mkdir()
    else:
        manifest.symlink_to(tmp_path / "nowhere")
    assert MemoryBank.exists(place)
    with pytest.raises(BankError, match=r"manifest\.json is damaged: it is a"):
        MemoryBank.open(place)
    with pytest.raises(BankError, match="already holds a memory bank"):
        MemoryBank.create(place, "f00d")


def test_where_the_system_refuses_a_bank_is_neither_there_nor_missing(bank: Path) -> None:
    (bank / "manifest.json").unlink()
    with faults(bank) as state:
        assert MemoryBank.exists(bank)
        calls = len(state.calls)
        for number in range(1, calls + 1):
            state.calls.clear()
            state.at(number, errno.EACCES)
            with pytest.raises(BankError, match=f"'{bank}' cannot be read as the folder of .*: Permission denied"):
                MemoryBank.exists(bank)
    assert calls == 2
