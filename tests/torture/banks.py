"""Banks, damaged with and without checksums that fit the damage."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch

from mac_rag.bank import MemoryBank
from mac_rag.bank.rows import RowLayout, row_crc
from mac_rag.bank.verify import verify
from mac_rag.data.types import Document
from mac_rag.nn.product_quantizer import ProductQuantizer
from tests.bank.helpers import alter_setting, overview_of, settings_of
from tests.torture.mutations import (
    VALUES,
    Mutations,
    Way,
    damage_bytes,
    damage_kind,
    mutate_bytes,
    mutate_json,
    refusal,
)
from tests.torture.part import Lost

State: TypeAlias = Any  # everything that a bank holds
MODEL = "f00d" * 16
TOKENS, WIDTH = 2, 3


class Torture(Mutations):
    """Banks of memory tokens, of product codes and of rounded rows, with a deleted and a merged entry."""

    def make(self, place: Path) -> list[Path]:
        folders = [place / kind for kind in ("tokens", "pq", "rounded", "log")]
        for folder in folders:
            folder.mkdir(parents=True)
            _make(folder / "bank", folder.name)
        self._written = [_read(folder / "bank") for folder in folders]  # a log counts up to its first damage
        with MemoryBank.open(folders[-1] / "bank", write=True) as bank:  # what its log says is in no file yet
            bank.put([Document("k", "k")], torch.ones(1, TOKENS, WIDTH))
            bank.commit()
            self._written.append(_read(folders[-1] / "bank"))
            shutil.copytree(folders[-1], place / "copy", ignore=shutil.ignore_patterns("*-lock", "*-shm"))
        shutil.rmtree(folders[-1])
        (place / "copy").rename(folders[-1])
        return folders

    def ways(self, folder: Path, *, sealed: bool) -> Sequence[Way]:
        self._is_sealed = sealed
        if sealed:
            return [_setting, _row, _document, _codebook, _number, _schema]
        return [damage_bytes, damage_bytes, damage_kind]

    def check(self, folder: Path) -> None:
        """Opens, verifies and changes the bank; what can be read is sound."""
        path = folder / "bank"
        found: list[State] = []
        refused = refusal(lambda: found.append(_read(path)))
        assert refused is None or str(path) in refused, refused
        if found and not self._is_sealed and found[0] not in self._written:
            raise Lost("the bank holds what nobody has written, and does not say so")
        if refusal(lambda: verify(path)):
            return
        refusal(lambda: _change(path))
        refusal(lambda: _read(path))


def _make(path: Path, kind: str) -> None:
    with MemoryBank.create(path, MODEL, keep_texts=kind == "tokens") as bank:
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


def _read(path: Path) -> State:
    """Reads all of a bank that can be opened; returns it."""
    with MemoryBank.open(path) as bank:
        names = bank.document_ids
        phi = bank.phi if len(bank) else torch.empty(0)
        assert phi.isfinite().all()
        summaries = overview_of(bank)
        assert len(bank) == len(set(names))
        keys = bank.row_keys.tolist()
        assert keys == sorted(set(keys))
        entries = [(entry.members, entry.phi.tolist(), entry.texts) for entry in bank]
        assert sum(len(rows) for _, rows, _ in entries) == len(keys)
        if len(bank):
            assert len(bank.row_members) == len(keys)
        return names, phi.tolist(), summaries, entries, bank.directory.dates.tolist(), bank.directory.hashes.tolist()


def _change(path: Path) -> None:
    with MemoryBank.open(path, write=True) as bank:
        if bank.row_shape == (TOKENS, WIDTH):
            bank.put([Document("new", "")], torch.zeros(1, TOKENS, WIDTH))
            bank.compact()


@contextmanager
def _database(folder: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(folder / "bank", isolation_level=None)) as connection:
        yield connection
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _one(connection: sqlite3.Connection, rng: random.Random, columns: str, table: str) -> Any:
    rows = connection.execute(f"SELECT {columns} FROM {table} ORDER BY 1").fetchall()
    return rng.choice(rows) if rows else None


def _setting(folder: Path, rng: random.Random) -> str:
    name, value = rng.choice(sorted(settings_of(folder / "bank").items()))
    text = mutate_json({"value": value}, rng)
    try:
        text = json.dumps(json.loads(text)["value"])
    except (ValueError, KeyError, RecursionError, TypeError):
        text = text[:1000]
    alter_setting(folder / "bank", name, text)
    return f"{name} {text[:200]}"


def _row(folder: Path, rng: random.Random) -> str:
    with _database(folder) as connection:
        key, *blobs = _one(connection, rng, "key, codes, summary, places, weights", "row")
        place = rng.randrange(4)
        blobs[place] = mutate_bytes(blobs[place], rng)
        connection.execute(
            "UPDATE row SET codes = ?, summary = ?, places = ?, weights = ?, crc = ?, overview_crc = ? WHERE key = ?",
            (*blobs, row_crc(blobs[0], *blobs[2:]), row_crc(*blobs[1:]), key),
        )
    return str(blobs)[:200]


def _document(folder: Path, rng: random.Random) -> str:
    with _database(folder) as connection:
        key, *fields = _one(connection, rng, "key, id, lower(hex(content_hash)), metadata, added", "document")
        place = rng.randrange(4)
        strange = ["", "2004"] if place == 1 else ["", "x", "\x00", "2004"]
        fields[place] = mutate_json(json.loads(fields[2]), rng) if place == 2 else rng.choice(strange)
        crc = zlib.crc32("\0".join(fields).encode("utf-8", "surrogatepass"))
        with suppress(sqlite3.IntegrityError):  # an id that another has
            connection.execute(
                "UPDATE document SET id = ?, content_hash = ?, metadata = ?, added = ?, crc = ? WHERE key = ?",
                (fields[0], bytes.fromhex(fields[1]), *fields[2:], crc, key),
            )
    return str(fields)[:300]


def _codebook(folder: Path, rng: random.Random) -> str:
    with _database(folder) as connection:
        found = connection.execute("SELECT data FROM codebook").fetchone()
        data = mutate_bytes(found[0] if found else bytes(64), rng)
        connection.execute("INSERT OR REPLACE INTO codebook VALUES (1, ?, ?)", (data, zlib.crc32(data)))
    return data[:60].hex()


def _number(folder: Path, rng: random.Random) -> str:
    """A number of the tables that say what belongs to what."""
    table, column = rng.choice(
        [("document", "key"), ("document", "rows"), ("document", "hash"), ("document", "moment"), ("row", "key"),
         ("row", "tokens"), ("row", "crc"), ("change", "entry"), ("writer", "version")]
    )  # fmt: skip
    numbers = [value for value in VALUES if type(value) is int and -(1 << 63) <= value < 1 << 63]
    with _database(folder) as connection:
        found = _one(connection, rng, f"{column}", table)
        value = rng.choice(numbers)
        if found is not None:
            try:
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", (value, found[0]))
            except sqlite3.IntegrityError:
                connection.execute(f"DELETE FROM {table} WHERE {column} = ?", found)
    return f"{table}.{column} = {value}"


def _schema(folder: Path, rng: random.Random) -> str:
    statement = rng.choice(
        [
            "CREATE TRIGGER t AFTER INSERT ON row BEGIN DELETE FROM row; END",
            "CREATE VIEW v AS SELECT * FROM row",
            "CREATE INDEX i ON row (tokens)",
            "CREATE TABLE more (a)",
            "DROP TABLE text",
            "DROP TABLE setting",
            "ALTER TABLE row ADD COLUMN more TEXT",
            "PRAGMA user_version = 2",
            "PRAGMA application_id = 7",
            "PRAGMA journal_mode = WAL",
        ]
    )
    with _database(folder) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute(statement)
    return statement
