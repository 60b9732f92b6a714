"""The index of a segment: it finds what the records say, stands for them at opening, and must be able to be true."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mac_rag.bank.storage import record_lines, records_file
from mac_rag.bank.storage.entry_index import EntryIndex, read_index
from mac_rag.bank.storage.manifest import MANIFEST, SegmentInfo, read_manifest, write_manifest
from mac_rag.bank.storage.record_lines import RecordLine
from mac_rag.bank.storage.repair import repair, verify
from torch import Tensor

from mac_rag.bank import MemoryBank, entry_table
from mac_rag.bank.directory import Record
from mac_rag.bank.rows import RowLayout
from mac_rag.data.document_ids import id_hash
from mac_rag.data.provenance import Member
from mac_rag.data.types import Document
from mac_rag.errors import BankError, DamageError
from mac_rag.untrusted_files import MalformedError
from tests.bank.helpers import memory

LAYOUT = RowLayout(dtype="bf16")
IDS = [f"document {number}" for number in range(9)]


@pytest.fixture
def bank_folder(folder: Path) -> Path:
    """A bank of two segments with entries of one and two rows, one of them merged, two deleted."""
    with MemoryBank.create(folder / "bank", "f00d") as bank:
        bank.keep_rows_as(LAYOUT)
        bank.put([Document(name, name) for name in IDS[:7]], memory(9, 1), [1, 2, 1, 1, 2, 1, 1])
        bank.merge([IDS[1], IDS[3]], memory(1, 2))
        bank.commit()
        bank.put([Document(name, name) for name in IDS[7:]], memory(2, 3))
        bank.commit()
        bank.delete(IDS[4])
        bank.delete(IDS[8])
        bank.commit()
    return folder / "bank"


def line(number: int, sequence: int, rows: int, names: list[str], start: int) -> tuple[RecordLine, int]:
    members = tuple(Member(name, "hash", {}, "today") for name in names)
    return RecordLine(Record(sequence, rows, members), start, hashlib.sha256(bytes([number])).hexdigest()), 100 + number


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5)), min_size=1, max_size=12))
def test_it_says_what_the_records_say(entries: list[tuple[int, int, int]]) -> None:
    lines, sequence, start, name = [], -1, 0, 0
    for number, (step, documents, rows) in enumerate(entries):
        names = [f"d{name + each}" for each in range(documents)]
        lines.append(line(number, sequence := sequence + step, rows, names, start))
        start, name = start + rows, name + documents
    index = EntryIndex.of(lines)
    index.check(info(index, entries=len(entries), rows=start))
    for number, ((record, first, checksum), length) in enumerate(lines):
        assert index.starts[number] == first
        assert bytes(index.checksums[number].tolist()).hex() == checksum
        assert index.lines[number + 1] - index.lines[number] == length
        for document_id in record.document_ids:
            assert list(index.entries_with(id_hash(document_id))) == [number]
    assert list(index.entries_with(id_hash("another"))) == []


def info(index: EntryIndex, *, entries: int, rows: int, digest: str = "0" * 64) -> SegmentInfo:
    other = "1" * 64
    return SegmentInfo(
        name="segment-" + "0" * 16,
        entries=entries,
        shape=(rows, 2, 4),
        offset=16,
        tokens=other,
        records=other,
        overview=other,
        index=digest,
    )


def test_opening_and_asking_for_rows_reads_no_record(bank_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MemoryBank.open(bank_folder) as bank:
        rows, keys = bank.phi, bank.row_keys
    read: list[bytes] = []
    decode = record_lines.decode_alone

    def noted(data: bytes) -> RecordLine:
        read.append(data)
        return decode(data)

    monkeypatch.setattr(record_lines, "decode_alone", noted)
    with MemoryBank.open(bank_folder) as bank:
        assert len(bank) == 7
        assert torch.equal(bank.phi, rows)
        assert torch.equal(bank.row_keys, keys)
        assert "another document" not in bank
        assert not read
        assert bank[IDS[3]].document_id == IDS[1]
        assert bank.visible_rows({IDS[2], IDS[7], IDS[1]}).tolist() == [False, True, False, False, False, True]
        assert len(read) == 4  # once for each name that is asked for


def test_documents_with_the_same_hash_are_told_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (entry_table, records_file):
        monkeypatch.setattr(module, "id_hash", lambda document_id: len(document_id))
    with MemoryBank.create(folder / "bank", "f00d") as bank:
        bank.keep_rows_as(LAYOUT)
        bank.put([Document(name, name) for name in IDS], memory(9, 1))
        bank.commit()
        bank.put([Document(IDS[0], "changed")], memory(1, 2))
        bank.delete(IDS[5])
        bank.commit()
    with MemoryBank.open(folder / "bank") as bank:
        assert [name in bank for name in (*IDS, "document x")] == [*[True] * 5, False, *[True] * 3, False]
        assert [bank[name].document_id for name in IDS if name != IDS[5]] == [name for name in IDS if name != IDS[5]]


HOSTILE = {
    "sequences": [lambda column: column.flip(0), lambda column: column - 1, lambda column: column.int()],
    "starts": [lambda column: column + 1, lambda column: column * 2, lambda column: column[:-1], torch.zeros_like],
    "documents": [lambda column: column.neg(), lambda column: column * 3],
    "lines": [lambda column: column * (1 << 40), lambda column: column.fill_(1 << 62)],
    "checksums": [lambda column: column[:, :31].contiguous(), lambda column: column.char()],
    "id_hashes": [lambda column: column.neg(), lambda column: column[:-1]],
    "order": [lambda column: column.fill_(-1), lambda column: column.fill_(0), lambda column: column + 1],
}


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, changes in HOSTILE.items() for number in range(len(changes))]
)
def test_an_index_that_cannot_be_true(bank_folder: Path, name: str, number: int) -> None:
    """Its checksum fits it, and so does the manifest's, as those of a hostile bank do."""
    manifest = read_manifest(bank_folder / MANIFEST)
    segment = manifest.segments[0]
    path = bank_folder / segment.index_file
    index = read_index(path, segment)
    changed: Tensor = HOSTILE[name][number](getattr(index, name).clone())
    data = index._replace(**{name: changed}).encoded()
    path.write_bytes(data)
    sealed = segment.model_copy(update={"index": hashlib.sha256(data).hexdigest()})
    with pytest.raises(MalformedError):
        read_index(path, sealed)
    write_manifest(bank_folder, manifest.model_copy(update={"segments": (sealed, *manifest.segments[1:])}))
    with pytest.raises(DamageError, match=segment.index_file):
        MemoryBank.open(bank_folder)
    report = repair(bank_folder)
    assert report.repaired
    assert (report.lost, report.unnamed, report.documents) == ((), 0, 7)
    assert verify(bank_folder).clean


def test_records_that_the_index_contradicts_are_damage(bank_folder: Path) -> None:
    manifest = read_manifest(bank_folder / MANIFEST)
    segment = manifest.segments[0]
    index = read_index(bank_folder / segment.index_file, segment)
    hashes = index.id_hashes.clone()
    hashes[0] = id_hash("intruder")
    data = index._replace(id_hashes=hashes, order=hashes.argsort()).encoded()
    (bank_folder / segment.index_file).write_bytes(data)
    sealed = segment.model_copy(update={"index": hashlib.sha256(data).hexdigest()})
    write_manifest(bank_folder, manifest.model_copy(update={"segments": (sealed, *manifest.segments[1:])}))
    with MemoryBank.open(bank_folder) as bank:
        with pytest.raises(DamageError, match="line 1: it does not say what the index says"):
            "intruder" in bank  # noqa: B015
        with pytest.raises(DamageError, match=segment.records_file):
            bank.document_ids  # noqa: B018
        assert IDS[2] in bank
    assert not verify(bank_folder).clean
    assert repair(bank_folder).lost == ()
    with MemoryBank.open(bank_folder) as bank:
        assert IDS[0] in bank


def test_an_index_that_is_a_hole(bank_folder: Path) -> None:
    segment = read_manifest(bank_folder / MANIFEST).segments[0]
    with (bank_folder / segment.index_file).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BankError, match="hole"):
        MemoryBank.open(bank_folder)
