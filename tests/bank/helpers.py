"""Helpers of the bank's tests: a fast folder, memory tokens that can be recognised, and writers to be killed."""

from __future__ import annotations

import json
import random
import sqlite3
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from mac_rag.bank import BankEntry, MemoryBank, database
from mac_rag.bank.bank import Contents
from mac_rag.bank.directory import index_crc
from mac_rag.bank.rows import RowLayout
from mac_rag.data.types import Document
from mac_rag.errors import BankError
from mac_rag.nn.prior import PriorKeys
from mac_rag.nn.product_quantizer import ProductQuantizer
from tests.places import IN_MEMORY

if TYPE_CHECKING:  # it imports transformers, which takes a process of its own seconds
    from mac_rag.model import MACModel

TOKENS, WIDTH = 2, 3


@contextmanager
def fast_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        yield Path(folder)


# How far the same bank may be read differently, because a sum is rounded by its order.
ROUNDING = {"rtol": 1e-4, "atol": 2e-6}


def random_rows(model: MACModel, rows: int, seed: int) -> Tensor:
    shape = model.amortize(["text"]).shape[1:]
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(seed))


READINGS: dict[str, dict[str, Any]] = {
    "streaming": {"strategy": "streaming"},
    "not cached": {"strategy": "streaming", "cache_bytes": 0},
    "preselect": {"strategy": "preselect", "preselected": 2},
    "preselect, not cached": {"strategy": "preselect", "preselected": 3, "cache_bytes": 0},
    "hierarchical": {"strategy": "hierarchical", "subgroup": 2},
    "hierarchical, not cached": {"strategy": "hierarchical", "subgroup": 3, "cache_bytes": 0},
}


def rounded(layout: RowLayout, phi: Tensor, quantizer: ProductQuantizer | None = None) -> Tensor:
    """Memory tokens as a bank of this layout gives them back."""
    return layout.decode(layout.encode(phi, quantizer), quantizer)


def memory(rows: int, value: float = 1.0) -> Tensor:
    return torch.full((rows, TOKENS, WIDTH), value)


def put(bank: MemoryBank, name: str, value: float) -> None:
    """Adds a document and commits."""
    bank.put([Document(name, f"text {value}")], memory(1, value))
    bank.commit()


def contents(bank: Contents) -> dict[str, float]:
    """The value of each document's memory tokens; every document must be there once, and whole."""
    found = [(entry.document_id, entry.phi) for entry in bank]
    assert all((phi == phi[0, 0, 0]).all() for _, phi in found)
    assert len({name for name, _ in found}) == len(found) == len(bank.document_ids) == len(bank)
    return {name: float(phi[0, 0, 0]) for name, phi in found}


def write_for_ever(path: Path, seed: int, number: int, said: Connection) -> None:
    """Changes a bank at random until it is killed.

    Before each commit it says what is going to be true after it, and afterwards that it has been done.
    """
    choice = random.Random(seed)
    bank = MemoryBank.open(path, write=True)
    expected = contents(bank)
    said.send(expected)
    while True:
        for _ in range(choice.randint(1, 3)):
            if expected and choice.random() < 0.3:
                name = choice.choice(sorted(expected))
                bank.delete(name)
                del expected[name]
            else:
                names = choice.sample([f"document {index}" for index in range(40)], choice.randint(1, 10))
                number += 1
                rows = [choice.randint(1, 2) for _ in names]
                bank.put([Document(name, f"text {number}") for name in names], memory(sum(rows), number), rows)
                expected |= dict.fromkeys(names, float(number))
        said.send(expected)
        bank.compact() if choice.random() < 0.2 else bank.commit()
        said.send("done")


def update_for_ever(path: Path, said: Connection) -> None:
    """Replaces all documents again and again, all in one commit, and compacts the bank now and then."""
    number, database._WAIT = 0, 0.01
    with MemoryBank.open(path, write=True) as bank:
        names = bank.document_ids
        while True:
            number += 1
            bank.put([Document(name, str(number)) for name in names], memory(len(names), number))
            bank.commit()
            if number % 3 == 0:
                with suppress(BankError):  # somebody reads an older commit
                    bank.compact()
            if number == 1:
                said.send("writing")


def alter(path: Path, statement: str, *values: Any) -> None:
    """Changes a bank's file behind its back; the statement may use `crc32` and `index_crc`."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.create_function("crc32", 1, lambda text: zlib.crc32(text.encode("utf-8", "surrogatepass")))
        connection.create_function("index_crc", 5, lambda *numbers: index_crc(*numbers[:-1], data=numbers[-1]))
        assert connection.execute(statement, values).rowcount


def settings_of(path: Path) -> dict[str, Any]:
    """The settings of a bank by name, as its file has them."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        [(data,)] = connection.execute("SELECT data FROM setting")
    found: dict[str, Any] = json.loads(data)
    return found


def alter_setting(path: Path, name: str, value: str) -> None:
    """Changes a setting of a bank, with the checksum that fits; its new value need not be JSON."""
    values = {each: json.dumps(held) for each, held in settings_of(path).items()} | {name: value}
    data = "{" + ", ".join(f"{json.dumps(each)}: {held}" for each, held in values.items()) + "}"
    alter(path, "UPDATE setting SET data = ?1, crc = crc32(version || char(0) || ?1)", data)


def put_entries(bank: MemoryBank, entries: Iterable[BankEntry]) -> None:
    """Puts entries of another bank, merged ones as merged ones."""
    for entry in entries:
        names = [member.document_id for member in entry.members]
        bank.put([Document(name, "") for name in names], entry.phi[:1].expand(len(names), -1, -1))
        bank.merge(names, entry.phi)


def files_of(path: Path) -> bytes:
    """The bytes of a bank's file and of all files beside it."""
    return b"".join(file.read_bytes() for file in sorted(path.parent.glob(f"{path.name}*")))


def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Takes the number of rows of each reading of any bank from now on."""
    numbers: list[int] = []
    take = Contents.take

    def counted(self: Contents, index: Tensor) -> Tensor:
        numbers.append(len(index))
        return take(self, index)

    monkeypatch.setattr(Contents, "take", counted)
    return numbers


def whole_keys(keys: PriorKeys) -> Tensor:
    """Keys of the document prior with their zeros, `[K, P + L]`."""
    [held, *_] = keys._parts
    width = held.dense.shape[1] + (0 if held.lexical is None else held.lexical.width)
    return keys.products(torch.eye(width, dtype=held.dense.dtype)).T


def overview_of(bank: Contents) -> list[list[Any]]:
    """All that a bank keeps to be read of every row at once."""
    parts = bank.overview() if bank.layout.summary else []
    return [[each.tolist() for each in (part.summaries, *part.lexical)] for part in parts]
