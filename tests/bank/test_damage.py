"""Bytes that rot, and content that nobody wrote with checksums that fit: refused by name, never another error."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from mac_rag.bank import MemoryBank
from mac_rag.bank.bank import Contents
from mac_rag.bank.copies import backup
from mac_rag.bank.directory import Directory
from mac_rag.bank.known_documents import KnownDocuments
from mac_rag.bank.rows import RowLayout, row_crc
from mac_rag.bank.verify import verify
from mac_rag.data.types import Document
from mac_rag.errors import DamageError, MACError
from mac_rag.nn.product_quantizer import ProductQuantizer
from tests.bank.helpers import TOKENS, WIDTH, alter, alter_setting, fast_folder, memory, overview_of

MODEL = "f00d" * 16
NAMES = ["a", "b", "ü/..\\\n", "d", "e"]
QUANTIZER = ProductQuantizer.fit(
    torch.randn(300, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)), WIDTH, fingerprint=MODEL, whole=1
)
LAYOUTS = {
    "fp32": RowLayout(dtype="fp32"),
    "bf16": RowLayout(dtype="bf16", lexical_vectors=1, summary=2),
    "int8": RowLayout(dtype="int8", lexical_vectors=1),
    "pq": RowLayout(summary=4, prior_keys=2).quantized(QUANTIZER),
}


def make(path: Path, kind: str) -> Path:
    layout = LAYOUTS[kind]
    phi = torch.cat([memory(12), torch.ones(12, layout.lexical_vectors, WIDTH)], 1)
    phi *= torch.arange(1.0, 13)[:, None, None]
    with MemoryBank.create(path, MODEL, keep_texts=True) as bank:
        bank.keep_rows_as(layout, QUANTIZER if kind == "pq" else None)
        documents = [
            Document(name, f"text of {name} " * 9, {"date": "2001", "supersedes": ["d"] if name == "b" else []})
            for name in NAMES
        ]
        bank.put(documents, phi[:10], [2] * 5, summarise=lambda kept: kept.flatten(1)[:, : layout.summary])
        bank.commit()
        bank.merge(["a", "d"], phi[10:])
        bank.commit()
    return path


@cache
def example(kind: str) -> tuple[bytes, dict[str, Any]]:
    """The bytes of a bank, and what each use of it gives."""
    with fast_folder() as folder:
        path = make(folder / "bank", kind)
        with MemoryBank.open(path) as bank:
            return path.read_bytes(), {name: use(bank) for name, use in USES.items()}


def entries(bank: Contents) -> Any:
    return [(entry.members, entry.sequence, entry.texts, entry.phi.tolist()) for entry in bank]


# Ids are looked up in an index of SQLite's. If it is damaged, a document can be missed; `verify` says so.
USES: dict[str, Callable[[MemoryBank], Any]] = {
    "entries": entries,
    "ids": lambda bank: bank.document_ids,
    "rows": lambda bank: (bank.row_keys.tolist(), bank.row_members, bank.fingerprint),
    "directory": lambda bank: [getattr(bank.directory, column.name).tolist() for column in fields(Directory)],
    "known": lambda bank: bank.visible_rows(KnownDocuments(bank, None)).tolist(),
    "phi": lambda bank: bank.phi.tolist(),
    "take": lambda bank: bank.take(torch.tensor([7, 0, 3])).tolist(),
    "overview": overview_of,
}


def check(path: Path, expected: dict[str, Any]) -> bool:
    """Each use of a bank gives what was written or refuses. True if one refuses."""
    try:
        bank = MemoryBank.open(path, fingerprint=MODEL)
    except MACError:
        return True
    is_refused = False
    with bank:
        for name, use in USES.items():
            try:
                assert use(bank) == expected[name], name
            except MACError:
                is_refused = True
        for name in (*NAMES, "nobody"):
            with suppress(MACError):
                _ = name in bank, bank[name].phi, bank.visible_rows({name})
    return is_refused


def change(path: Path) -> None:
    """Uses a bank as a writer does."""
    with MemoryBank.open(path, write=True) as bank:
        bank.describe([Document("b", "text of b " * 9)])
        bank.put([Document("a", "new")], torch.ones(1, *bank.row_shape or (1, 1)))
        bank.delete(bank.document_ids[0])
        bank.compact()


@pytest.mark.parametrize("kind", LAYOUTS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_bytes_that_rot(kind: str, data: st.DataObject) -> None:
    written, expected = example(kind)
    start = data.draw(st.integers(0, len(written) - 1), label="start")
    if not any(written[start : start + 4]):  # most of a small bank's pages is empty
        start = next((place for place in range(start, len(written)) if written[place]), 0)
    new = data.draw(
        st.binary(min_size=1, max_size=4) | st.integers(0, 7).map(lambda bit: bytes([written[start] ^ 1 << bit]))
    )
    with fast_folder() as folder:
        path = folder / "bank"
        path.write_bytes(written[:start] + new + written[start + len(new) :])
        is_refused = check(path, expected)
        report = verify_or_refuse(path)
        assert (report is None) >= is_refused, report
        with suppress(MACError):
            change(path)


def verify_or_refuse(path: Path) -> str | None:
    """What is wrong with a bank; an empty text if nothing is. None if it is damaged."""
    try:
        return "" if verify(path).clean else None
    except MACError:
        return None


@pytest.mark.parametrize("cut", [4096, 9000])
def test_a_bank_that_was_cut_short(folder: Path, cut: int) -> None:
    written, expected = example("bf16")
    path = folder / "bank"
    path.write_bytes(written[:-cut])
    assert check(path, expected)
    assert verify_or_refuse(path) is None


def rewrite(path: Path, column: str, new: Callable[[Any], Any]) -> None:
    """Changes one value of a document's first row, and makes the checksums fit."""
    with MemoryBank.open(path) as bank:
        key = int(bank.row_keys[0])
        columns = ("summary", "places", "weights", "codes")
        [values] = bank.connection.rows(f"SELECT {', '.join(columns)} FROM row WHERE key = ?", (key,))
    row = dict(zip(columns, values))
    row[column] = new(row[column])
    crcs = [row_crc(row[first], row["places"], row["weights"]) for first in ("codes", "summary")]
    alter(path, f"UPDATE row SET {column} = ?, crc = ?, overview_crc = ? WHERE key = ?", row[column], *crcs, key)


NAN, INFINITE = struct.pack("<f", float("nan")), struct.pack("<f", float("inf"))
FORGED_ROWS: dict[str, tuple[str, str, Callable[[bytes], bytes]]] = {
    "a number": ("fp32", "codes", lambda data: NAN + data[4:]),
    "a scale": ("int8", "codes", lambda data: INFINITE + data[4:]),
    "short": ("fp32", "codes", lambda data: data[:-1]),
    "nothing": ("pq", "codes", lambda _: b""),
    "a weight": ("int8", "weights", lambda data: INFINITE[2:] + data[2:]),
    "no weight": ("bf16", "weights", lambda data: b"\0\0" + data[2:]),
    "few weights": ("bf16", "weights", lambda data: data[2:]),
    "a place": ("bf16", "places", lambda data: struct.pack("<H", WIDTH) + data[2:]),
    "odd places": ("int8", "places", lambda data: data + b"\0"),
}


@pytest.mark.parametrize("name", FORGED_ROWS)
def test_rows_that_nobody_wrote(folder: Path, name: str) -> None:
    kind, column, new = FORGED_ROWS[name]
    path = make(folder / "bank", kind)
    rewrite(path, column, new)
    first = MemoryBank.open(path).document_ids[0]
    with MemoryBank.open(path) as bank:
        with pytest.raises(DamageError, match=r"bank is damaged: the memory tokens of 'b'"):
            _ = bank[first].phi
        assert bank["d"].phi.isfinite().all()
        if bank.layout.summary and column != "codes":
            with pytest.raises(DamageError):
                list(bank.overview())
    assert "'b'" in str(verify(path))


@pytest.mark.parametrize("number", [NAN, INFINITE])
def test_summaries_that_nobody_wrote(folder: Path, number: bytes) -> None:
    path = make(folder / "bank", "bf16")
    rewrite(path, "summary", lambda data: data[:-4] + number)
    with MemoryBank.open(path) as bank, pytest.raises(DamageError, match="summary is not finite"):
        list(bank.overview())
    assert "summary is not finite" in str(verify(path))


DOCUMENTS: dict[str, str] = {
    "a list": "[]",
    "no JSON": "{",
    "deep": "[" * 100_000,
    "not a number": '{"a": NaN}',
    "twice": '{"a": 1, "a": 2}',
    "long": '{"a": ' + "9" * 5000 + "}",
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_metadata_that_nobody_wrote(folder: Path, name: str) -> None:
    path = make(folder / "bank", "fp32")
    with MemoryBank.open(path) as bank:
        [(*fields, _)] = bank.connection.rows(
            "SELECT id, lower(hex(content_hash)), added, crc FROM document WHERE id = 'b'"
        )
    document_id, content_hash, added = fields
    crc = zlib.crc32("\0".join([document_id, content_hash, DOCUMENTS[name], added]).encode())
    alter(path, "UPDATE document SET metadata = ?, crc = ? WHERE id = 'b'", DOCUMENTS[name], crc)
    with MemoryBank.open(path) as bank:
        for use in (lambda: bank["b"].members, lambda: list(bank), lambda: bank.entry(1).members):
            with pytest.raises(DamageError, match=r"bank is damaged: document 'b'"):
                use()
        assert bank["d"].metadata
    assert "document 'b'" in str(verify(path))


LATE = 1 << 56
STATEMENTS = {
    "no documents": "DELETE FROM document",
    "one document less": "DELETE FROM document WHERE id = 'b'",
    **{
        name: f"UPDATE document SET rows = {rows}, index_crc = index_crc(key, {rows}, hash, moment, supersedes)"
        for name, rows in (("no rows", 0), ("rows below none", -1), ("many rows", 1 << 40))
    },
    "another number of rows": "UPDATE document SET rows = 7, index_crc = index_crc(key, 7, hash, moment, supersedes) "
    "WHERE id = (SELECT max(id) FROM document GROUP BY key >> 16 HAVING count(*) > 1)",
    "a number of rows without its checksum": "UPDATE document SET rows = 7 WHERE id = 'b'",
    "a late entry": f"UPDATE document SET key = {LATE}, index_crc = index_crc({LATE}, rows, hash, moment, supersedes) "
    "WHERE key = (SELECT max(key) FROM document)",
    "a lost entry": "DELETE FROM document WHERE key >> 16 = 1",
    "another date": "UPDATE document SET moment = 5 WHERE id = 'b'",
    "another hash": "UPDATE document SET hash = 5 WHERE id = 'b'",
    "others superseded": "UPDATE document SET supersedes = x'0102030405060708' WHERE id = 'b'",
    "a part of a hash": "UPDATE document SET supersedes = x'010203' WHERE id = 'b'",
}
SETTINGS = {
    "version": ["-1", "[]", str(1 << 80), "9" * 5000, "NaN", "{", "[" * 100_000],
    "shape": ["null", "[2]", "[2, 0]", "[-2, 3]", f"[{1 << 40}, {1 << 40}]", "[2147483647, 2147483647]", "[2, 4]"],
    "next_sequence": ["0", "null"],
    "layout": [
        '{"dtype": "bf16", "lexical_vectors": 2147483647, "summary": 2}',
        '{"dtype": "fp64"}',
        '{"dtype": "bf16", "code_bytes": 3}',
        '{"summary": 1, "prior_keys": 2}',
    ],
    "intent": ['{"puts": [[]]}', '{"other": 1}'],
    "fingerprint": ["null", "3"],
    "keep_texts": ['"perhaps"'],
    "unknown": ["1"],
}


def test_entries_that_contradict_the_rest(folder: Path) -> None:
    written, expected = example("bf16")
    for name, statement in STATEMENTS.items():
        (folder / "bank").write_bytes(written)
        alter(folder / "bank", statement)
        with pytest.raises(DamageError):
            MemoryBank.open(folder / "bank")
        assert check(folder / "bank", expected), name
        assert not verify(folder / "bank").clean


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_cannot_be(folder: Path, name: str) -> None:
    written, expected = example("bf16")
    for value in SETTINGS[name]:
        (folder / "bank").write_bytes(written)
        alter_setting(folder / "bank", name, value)
        assert check(folder / "bank", expected), value
        assert not verify(folder / "bank").clean


def _set(name: str, value: torch.Tensor) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.__setitem__(name, value)


CODEBOOKS: dict[str, Callable[[dict[str, Any]], object]] = {
    "not finite": _set("mean", torch.full((TOKENS - 1, WIDTH), torch.nan)),
    "few codewords": _set("codewords", torch.zeros(WIDTH, 255, 1)),
    "none": lambda tensors: tensors.pop("mean"),
    "another model": _set("fingerprint", torch.zeros(32, dtype=torch.uint8)),
    "other rows": _set("mean", torch.zeros(TOKENS, WIDTH)),
}


@pytest.mark.parametrize("name", CODEBOOKS)
def test_codebooks_that_cannot_be(folder: Path, name: str) -> None:
    path = make(folder / "bank", "pq")
    with MemoryBank.open(path) as bank:
        [(data,)] = bank.connection.rows("SELECT data FROM codebook")
    tensors = load(data)
    CODEBOOKS[name](tensors)
    data = save(tensors)
    alter(path, "UPDATE codebook SET data = ?, crc = ?", data, zlib.crc32(data))
    with pytest.raises(DamageError):
        MemoryBank.open(path)
    alter(path, "DELETE FROM codebook")
    with pytest.raises(DamageError, match="no codebooks"):
        MemoryBank.open(path)


def test_a_damaged_row_is_named_and_its_document_can_be_deleted_or_replaced(folder: Path) -> None:
    path = make(folder / "bank", "bf16")
    alter(path, "UPDATE row SET codes = zeroblob(length(codes)) WHERE key = (SELECT key FROM document WHERE id = 'b')")
    alter(path, "UPDATE text SET text = 'another' WHERE document = (SELECT key FROM document WHERE id = 'e')")
    report = verify(path)
    assert len(report.faults) == 2
    assert "memory tokens of 'b'" in str(report)
    assert "text of document 'e'" in str(report)
    assert backup(path, folder / "copy") == 5  # page by page, with the damage
    with MemoryBank.open(path, write=True) as bank:
        bank.delete("b")
        bank.put([Document("e", "new")], torch.ones(1, TOKENS + 1, WIDTH))
        bank.compact()
    assert verify(path).clean


def test_texts_and_rows_that_are_missing(folder: Path) -> None:
    path = make(folder / "bank", "bf16")
    alter(path, "DELETE FROM text WHERE document = (SELECT key FROM document WHERE id = 'b')")
    alter(path, "DELETE FROM row WHERE key = (SELECT key FROM document WHERE id = 'e')")
    with MemoryBank.open(path) as bank:
        with pytest.raises(DamageError, match="text of document 'b'"):
            _ = bank["b"].texts
        with pytest.raises(DamageError, match=r"memory tokens of 'e'.*: they are missing"):
            _ = bank["e"].phi
    assert len(verify(path).faults) >= 2
