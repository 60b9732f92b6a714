"""Helpers of the memory tests: a fast folder, memory tokens that can be recognised, and writers to be killed."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mac_rag.bank import MemoryBank
from mac_rag.bank.bank import Contents
from mac_rag.bank.rows import RowLayout
from mac_rag.data.types import Document
from mac_rag.model import MACModel
from mac_rag.nn.product_quantizer import ProductQuantizer
from tests.places import IN_MEMORY

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


def write_for_ever(folder: Path, seed: int, number: int, said: Connection) -> None:
    """Changes a bank at random until it is killed.

    Before each commit it says what is going to be true after it, and afterwards that it has been done.
    """
    choice = random.Random(seed)
    bank = MemoryBank.open(folder, write=True)
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


def update_for_ever(folder: Path, said: Connection) -> None:
    """Replaces all documents again and again, all in one commit, and compacts the bank now and then."""
    number = 0
    with MemoryBank.open(folder, write=True) as bank:
        names = bank.document_ids
        while True:
            number += 1
            bank.put([Document(name, str(number)) for name in names], memory(len(names), number))
            bank.compact() if number % 3 == 0 else bank.commit()
            if number == 1:
                said.send("writing")


def stop_at(event: int, folder: Path, what: str, said: Connection) -> None:
    """Does something to a bank, and dies without a word just before its n-th step on the disk."""
    steps = 0

    def step(name: str, arguments: tuple[object, ...]) -> None:
        nonlocal steps
        if name in ("open", "os.rename", "os.remove", "os.mkdir") and str(folder) in str(arguments[0]):
            steps += 1
            if steps == event:
                os._exit(9)

    sys.addaudithook(step)
    change(folder, what)
    said.send("done")


def change(folder: Path, what: str) -> None:
    """One of several ways to change a bank."""
    if what == "create":
        MemoryBank.create(folder, "f00d").close()
        return
    if what == "save":  # with codes, so that a quantizer is written, too; it has 5 among its codewords
        fingerprint, words = "f00d" * 16, torch.arange(256.0)[:, None].expand(1, 256, WIDTH).contiguous()
        quantizer = ProductQuantizer(fingerprint, 0, torch.zeros(TOKENS, WIDTH), torch.eye(WIDTH), words)
        bank = MemoryBank(fingerprint)
        bank.keep_rows_as(RowLayout(dtype="pq"), quantizer)
        bank.put([Document("a", ""), Document("b", "")], memory(2, 5))
        bank.save(folder)
        return
    with MemoryBank.open(folder, write=True) as bank:
        if what == "merge segments":
            names = [f"new {index}" for index in range(len(bank))]
            bank.put([Document(name, "") for name in names], memory(len(names), 7))
        elif what == "add":
            bank.put([Document("new", "")], memory(1, 7))
        elif what == "delete":
            bank.delete(bank.document_ids[0])
        bank.compact() if what == "compact" else bank.commit()


def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Takes the number of rows of each reading of any bank from now on."""
    numbers: list[int] = []
    for name in ("take", "read"):
        reads = getattr(Contents, name)

        def counted(self: Contents, *index: Any, reads: Any = reads) -> Tensor:
            rows: Tensor = reads(self, *index)
            numbers.append(len(rows))
            return rows

        monkeypatch.setattr(Contents, name, counted)
    return numbers
