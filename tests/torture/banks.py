"""Banks, damaged with and without checksums that fit the damage."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from mac_rag.bank.storage.entry_index import EntryIndex
from mac_rag.bank.storage.manifest import SegmentInfo
from mac_rag.bank.storage.repair import repair, verify
from mac_rag.bank.storage.segment import index_of_records
from mac_rag.bank.storage.tokens_file import rows_of
from pydantic import ValidationError
from safetensors.torch import load

from mac_rag.atomic_files import sealed
from mac_rag.bank import MemoryBank
from mac_rag.bank.rows import RowLayout
from mac_rag.data.types import Document
from mac_rag.nn.product_quantizer import ProductQuantizer
from mac_rag.untrusted_files import MalformedError
from tests.torture.mutations import Mutations, Way, damage_bytes, damage_json, damage_kind, mutate_json, refusal

MANIFESTS = ("manifest.json", "manifest.copy.json")
MODEL = "f00d" * 16
TOKENS, WIDTH = 2, 3


def make(place: Path) -> list[Path]:
    """Banks of memory tokens, product codes and rounded rows, of two segments, with a deleted and a merged entry."""
    folders = [place / "tokens" / "bank", place / "pq" / "bank", place / "rounded" / "bank"]
    for folder in folders:
        _make(folder, folder.parent.name)
    return folders


class Torture(Mutations):
    """Banks of memory tokens, of product codes and of rounded rows."""

    def make(self, place: Path) -> list[Path]:
        return make(place)

    def ways(self, folder: Path, *, sealed: bool) -> Sequence[Way]:
        if sealed:
            return [_manifest, _manifest, _record, _record, _numbers, _header, _lines]
        return [damage_bytes, damage_kind, damage_json]

    def check(self, folder: Path) -> None:
        """Opens, verifies and repairs the bank; what can be read is sound, and what is repaired stays so."""
        refused = refusal(lambda: _read(folder))
        assert refused is None or str(folder) in refused
        if refusal(lambda: verify(folder)) or refusal(lambda: repair(folder)):
            return
        assert verify(folder).clean, str(verify(folder))
        _read(folder)
        with MemoryBank.open(folder, write=True) as bank:
            if bank.row_shape == (TOKENS, WIDTH):
                bank.put([Document("new", "")], torch.zeros(1, TOKENS, WIDTH))
                bank.compact()
        assert verify(folder).clean


def _make(folder: Path, kind: str) -> None:
    with MemoryBank.create(folder, MODEL) as bank:
        if kind == "pq":
            tokens = torch.randn(300, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
            quantizer = ProductQuantizer.fit(tokens, WIDTH, fingerprint=MODEL, whole=1)
            bank.keep_rows_as(RowLayout(dtype="pq"), quantizer)
        if kind == "rounded":
            bank.keep_rows_as(RowLayout(dtype="bf16", lexical_vectors=1, summary=2))
        for group in ("abcdefgh", "ij"):
            documents = [Document(name, name, {"year": 2004, "nested": [{"a": [1.5]}]}) for name in group]
            rows = [1 + number % 2 for number in range(len(group))]
            bank.put(documents, torch.arange(sum(rows) * 6.0).view(-1, TOKENS, WIDTH) % 40, rows)
            bank.commit()
        bank.merge(["a", "e"], torch.full((1, TOKENS, WIDTH), 30.0))
        bank.delete("d")
        bank.commit()


def _read(folder: Path) -> None:
    """Reads all of a bank that can be opened."""
    bank = MemoryBank.open(folder)
    names = bank.document_ids
    if len(bank):
        assert bank.phi.isfinite().all()
        bank.overview()
    assert verify(folder).documents == len(bank) == len(set(names))
    if len(bank):
        keys = bank.row_keys.tolist()
        assert keys == sorted(set(keys))
        assert len(bank.row_members) == len(bank.phi) == sum(len(entry.phi) for entry in bank)


def _manifest(folder: Path, rng: random.Random) -> str:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["sha256"]
    text = mutate_json(manifest, rng)
    write_manifest(folder, _sealed(text))
    return text[:400]


def _record(folder: Path, rng: random.Random) -> str:
    manifest, segment = _segment(folder, rng)
    path = folder / f"{segment['name']}.jsonl"
    lines = path.read_bytes().splitlines()
    number = rng.randrange(len(lines))
    record = json.loads(lines[number])
    del record["sha256"]
    text = mutate_json(record, rng)
    lines[number] = _sealed(text)
    write(folder, manifest, segment, "records", b"".join(line + b"\n" for line in lines))
    return text[:400]


def _lines(folder: Path, rng: random.Random) -> str:
    """Lines that are removed, repeated, exchanged or taken from another segment."""
    manifest, segment = _segment(folder, rng)
    lines = (folder / f"{segment['name']}.jsonl").read_bytes().splitlines()
    others = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_bytes().splitlines()]
    place = rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[place]
        case 1:
            lines.insert(place, rng.choice(others))
        case 2:
            lines[place] = rng.choice(others)
        case _:
            rng.shuffle(lines)
    if rng.random() < 0.5:
        segment["entries"] = len(lines)
    write(folder, manifest, segment, "records", b"".join(line + b"\n" for line in lines))
    return f"{len(lines)} lines"


def _numbers(folder: Path, rng: random.Random) -> str:
    """A number in a tensor that no writer writes, with all checksums of it."""
    manifest, segment = _segment(folder, rng)
    data = bytearray((folder / f"{segment['name']}.safetensors").read_bytes())
    place = rng.randrange(segment["offset"], len(data), 4)
    patterns = [struct.pack("<f", float(name)) for name in ("nan", "inf", "-inf")] + [
        struct.pack("<i", 40),
        b"\xff" * 4,
    ]
    data[place : place + 4] = rng.choice(patterns)
    write_tokens(folder, manifest, segment, bytes(data))
    return f"{bytes(data[place : place + 4])!r} at {place}"


def write_tokens(folder: Path, manifest: dict[str, Any], segment: dict[str, Any], data: bytes) -> None:
    """Writes the tokens file of a segment, with all checksums of it."""
    layout = RowLayout.model_validate(manifest["layout"])
    rows = rows_of(bytearray(data), SegmentInfo.model_validate(segment), layout)
    records = []
    for line in (folder / f"{segment['name']}.jsonl").read_bytes().splitlines():
        record = json.loads(line)
        del record["sha256"]
        record["tokens"] = rows[record["start"] : record["start"] + record["rows"]].checksum()
        records.append(sealed(record) + b"\n")
    write(folder, manifest, segment, "records", b"".join(records))
    segment["overview"] = rows.overview.digest()
    write(folder, manifest, segment, "tokens", data)


def _header(folder: Path, rng: random.Random) -> str:
    """Another header of a tokens file, or of the codebooks, with checksums that fit."""
    manifest, segment = _segment(folder, rng)
    codebooks = sorted(file.name for file in folder.glob("codebook*"))
    name = rng.choice([f"{segment['name']}.safetensors", *codebooks])
    data = (folder / name).read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = mutate_json(json.loads(data[8 : 8 + length]), rng).encode()
    text += b" " * (-len(text) % 8)
    announced = rng.choice([len(text), len(text), length, 1 << 62, 0])
    data = announced.to_bytes(8, "little") + text + data[8 + length :]
    if name.startswith("codebook"):
        manifest["codebook"] = hashlib.sha256(data).hexdigest()
        for copy in codebooks:
            (folder / copy).write_bytes(data)
        write_manifest(folder, sealed(manifest))
    else:
        segment["offset"] = rng.choice([8 + len(text), segment["offset"]])
        write(folder, manifest, segment, "tokens", data)
    return text.decode(errors="replace")[:200]


def _segment(folder: Path, rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["sha256"]
    return manifest, rng.choice(manifest["segments"])


def write(folder: Path, manifest: dict[str, Any], segment: dict[str, Any], what: str, data: bytes) -> None:
    """Writes a file of a segment, with all checksums of it, and an index that leads to its records."""
    suffix = {"records": "jsonl", "tokens": "safetensors"}[what]
    (folder / f"{segment['name']}.{suffix}").write_bytes(data)
    segment[what] = hashlib.sha256(data).hexdigest()
    if what == "records":
        path = folder / f"{segment['name']}.index"
        path.write_bytes(_index(path, segment, data).encoded())
        segment["index"] = hashlib.sha256(path.read_bytes()).hexdigest()
    write_manifest(folder, sealed(manifest))


def _index(path: Path, segment: dict[str, Any], records: bytes) -> EntryIndex:
    """The index of these records; where they cannot be true, the former one with the places of the new lines."""
    with suppress(MalformedError, ValidationError):
        return index_of_records(path.with_suffix(".jsonl"), SegmentInfo.model_validate(segment))
    places = list(accumulate((len(line) for line in records.splitlines(keepends=True)), initial=0))
    return EntryIndex(**load(path.read_bytes()))._replace(lines=torch.tensor(places))


def write_manifest(folder: Path, data: bytes) -> None:
    for name in MANIFESTS:
        (folder / name).write_bytes(data)


def _sealed(text: str) -> bytes:
    """What `sealed` would write, if it took any text for JSON."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{text.rstrip()[:-1]},"sha256":"{digest}"}}'.encode()
