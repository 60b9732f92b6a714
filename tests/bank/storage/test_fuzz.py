"""Every file of a bank cut short, changed by a bit, or removed: it is noticed, named, and costs what it must."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mac_rag.bank.storage.repair import repair, verify
from mac_rag.bank.storage.store import Store

from mac_rag.bank import MemoryBank
from mac_rag.bank.rows import RowLayout
from mac_rag.data.types import Document
from mac_rag.errors import BankError, DamageError
from mac_rag.nn.product_quantizer import ProductQuantizer
from mac_rag.untrusted_files import printable
from tests.bank.helpers import TOKENS, WIDTH, fast_folder, memory

MODEL = "f00d" * 16
QUANTIZER = ProductQuantizer.fit(
    torch.randn(300, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)), WIDTH, fingerprint=MODEL, whole=1
)


@dataclass(frozen=True)
class Example:
    """The files of a bank, and which stretch of which file each of its documents cannot do without."""

    files: dict[str, bytes]
    documents: dict[str, float]
    needed: dict[str, list[tuple[int, int, tuple[str, ...]]]] = field(default_factory=dict)

    def lost(self, name: str, first: int, last: int) -> list[str]:
        """The documents that go with the bytes from `first` to `last` of a file."""
        hit = (ids for start, stop, ids in self.needed.get(name, []) if start <= last and first < stop)
        return list(dict.fromkeys(name for ids in hit for name in ids))


LAYOUTS = {
    "fp32": RowLayout(),
    "bf16": RowLayout(dtype="bf16", lexical_vectors=1, summary=2),
    "int8": RowLayout(dtype="int8", lexical_vectors=1),
    "pq": RowLayout().quantized(QUANTIZER),
}


@cache
def example(kind: str) -> Example:
    with fast_folder() as folder:
        with MemoryBank.create(folder, MODEL) as bank:
            bank.keep_rows_as(LAYOUTS[kind], QUANTIZER if kind == "pq" else None)
            for names in (["a", "b", "ü/..\\\n", "gone", "d", "e", "f", "g"], ["h", "i"]):
                for number, name in enumerate(names):
                    metadata = {"sequence": 1, "brace": "}\n{", "name": name}
                    bank.put([Document(name, name, metadata)], memory(1 + number % 2, number), [1 + number % 2])
                if "h" not in names:
                    bank.merge(["a", "e"], memory(1, 30))
                bank.commit()
            bank.delete("gone")
            bank.commit()
        files = {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith("writer")}
        with MemoryBank.open(folder) as bank:
            found = Example(files, values(bank))
        segments = Store.open(folder, write=False).segments
        assert len(segments) == 2
        for segment in segments:
            columns, offset = [], segment.info.offset
            for dtype, shape in LAYOUTS[kind].columns(segment.info.shape, segment.info.places).values():
                columns.append((offset, dtype.itemsize * math.prod(shape[1:])))
                offset += dtype.itemsize * math.prod(shape)
            rows = found.needed[segment.info.tokens_file] = []
            lines = found.needed[segment.info.records_file] = []
            place = 0
            for line in files[segment.info.records_file].splitlines():
                sequence = int(line.split(b",")[0].split(b":")[1])
                if sequence in segment:
                    record, start = segment[sequence]
                    for first, width in columns:
                        stretch = first + start * width, first + (start + record.rows) * width
                        rows.append((*stretch, record.document_ids))
                    lines.append((place, place + len(line), record.document_ids))
                place += len(line) + 1
    return found


def values(bank: MemoryBank) -> dict[str, float]:
    return {member.document_id: float(entry.phi.sum()) for entry in bank for member in entry.members}


@settings(max_examples=80, deadline=None)
@given(data=st.data(), kind=st.sampled_from(sorted(LAYOUTS)), how=st.sampled_from(["cut", "bit", "byte", "removed"]))
def test_damage_to_one_file(data: st.DataObject, kind: str, how: str) -> None:
    whole = example(kind)
    name = data.draw(st.sampled_from(sorted(whole.files)))
    content = bytearray(whole.files[name])
    place = data.draw(st.integers(0, len(content) - 1))
    if how in ("cut", "removed"):
        place = place if how == "cut" else 0
        lost = whole.lost(name, place, len(content))
        del content[place:]
    else:
        content[place] ^= 1 << data.draw(st.integers(0, 7)) if how == "bit" else data.draw(st.integers(1, 255))
        lost = whole.lost(name, place, place)
    with fast_folder() as folder:
        for other, undamaged in whole.files.items():
            (folder / other).write_bytes(content if other == name else undamaged)
        if how == "removed":
            (folder / name).unlink()
        check(folder, whole, name, lost)


def check(folder: Path, whole: Example, name: str, lost: list[str]) -> None:
    """The damage is noticed and named; repairing it costs these documents and nothing else."""
    path = str(folder / name)
    if ".copy." in name:
        assert values(MemoryBank.open(folder)) == whole.documents
    elif name.startswith("segment") and (opened := opened_or_refused(folder, path)) is not None:
        check_reading(opened, whole, path, lost)
    else:
        assert opened_or_refused(folder, path) is None
        with pytest.raises(BankError):
            MemoryBank.open(folder, write=True)
    before = {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith("writer")}
    report = verify(folder)
    assert [path in message for message in report.damage] == [True]
    assert (sorted(report.lost), report.unnamed) == (sorted(lost), 0)
    assert all(printable(document_id) in str(report) for document_id in lost)
    assert {file: (folder / file).read_bytes() for file in before} == before
    repaired = repair(folder)
    assert repaired.repaired
    assert (repaired.damage, repaired.lost, repaired.unnamed) == (report.damage, report.lost, 0)
    left = {document_id: value for document_id, value in whole.documents.items() if document_id not in lost}
    assert report.documents == repaired.documents == len(left)
    with MemoryBank.open(folder, write=True) as bank:
        assert values(bank) == left
        bank.put([Document("new", "")], memory(1, 5))
        bank.commit()
    assert verify(folder).clean
    assert repair(folder).clean


def opened_or_refused(folder: Path, path: str) -> MemoryBank | None:
    """The bank; None if it is refused, in the name of the damaged file."""
    refusal = ""
    try:
        return MemoryBank.open(folder)
    except BankError as error:
        refusal = str(error)
    assert path in refusal
    return None


def check_reading(bank: MemoryBank, whole: Example, path: str, lost: list[str]) -> None:
    """Rows and records are verified when they are read: those that are not damaged can be, the others never."""
    assert path.endswith((".safetensors", ".jsonl"))
    for document_id, value in whole.documents.items():
        if document_id in lost:
            with pytest.raises(DamageError) as refused:
                bank[document_id].phi  # noqa: B018
            assert path in str(refused.value)
        else:
            assert float(bank[document_id].phi.sum()) == value


def test_a_whole_bank_needs_no_repair(folder: Path) -> None:
    for name, data in example("pq").files.items():
        (folder / name).write_bytes(data)
    before = sorted(file.name for file in folder.iterdir())
    assert repair(folder).clean
    assert not repair(folder).repaired
    assert [name for name in sorted(file.name for file in folder.iterdir()) if "writer" not in name] == before


@pytest.mark.parametrize("kind", ["manifest", "codebook"])
def test_both_copies_damaged(folder: Path, kind: str) -> None:
    copy, whole = sorted((name for name in example("pq").files if name.startswith(kind)), key=lambda name: -len(name))
    for name, data in example("pq").files.items():
        (folder / name).write_bytes(data if name not in (copy, whole) else data[:-3])
    for use in (verify, repair):
        with pytest.raises(BankError, match=rf"{whole}.*{copy}.*backup"):
            use(folder)
    assert (folder / whole).read_bytes() == example("pq").files[whole][:-3]


def test_both_files_of_a_segment_lost(folder: Path) -> None:
    whole = example("fp32")
    for name, data in whole.files.items():
        (folder / name).write_bytes(data)
    first = sorted(name for name in whole.needed if name.endswith("jsonl"))[0]
    for name in (first, first.replace("jsonl", "safetensors")):
        (folder / name).unlink()
    report = repair(folder)
    ids = {document_id for _, _, ids in whole.needed[first] for document_id in ids}
    assert report.unnamed == len(whole.needed[first])
    assert values(MemoryBank.open(folder)) == {i: value for i, value in whole.documents.items() if i not in ids}
    assert "whose ids are lost too" in str(report)
