"""A store whose faults come when a test wants them, and banks with rows that are larger than a block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.memory import MemoryFileSystem

from mac_rag.data.types import Document
from mac_rag.memory import MemoryBank

TOKENS, WIDTH = 32, 256  # 32 KiB a row in fp32


class FlakyStore(MemoryFileSystem):
    """Files in memory under flaky://, whose reads can fail.

    Attributes:
        fault: is called before each read with the file's name, and can raise; what it returns, unless None, is read.
        reads: name, first byte and first byte behind of each read.
    """

    protocol = "flaky"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    cachable = False
    fault: Callable[[str], bytes | None] = lambda name: None
    reads: list[tuple[str, int | None, int | None]] = []

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        name = path.rpartition("/")[2]
        FlakyStore.reads.append((name, start, end))
        data = FlakyStore.fault(name)
        return super().cat_file(path, start=start, end=end, **options) if data is None else data

    @classmethod
    def clear(cls) -> None:
        cls.fault = lambda name: None
        cls.reads.clear()
        cls.store.clear()


fsspec.register_implementation("flaky", FlakyStore, clobber=True)


def rows(number: int) -> torch.Tensor:
    return torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(number))


def fill(folder: Path, documents: int, commits: int = 1) -> None:
    """A bank whose entries are `rows(number)`."""
    with MemoryBank.create(folder, "model") as bank:
        for commit in range(commits):
            numbers = range(commit * documents // commits, (commit + 1) * documents // commits)
            bank.put([Document(str(n), str(n)) for n in numbers], torch.cat([rows(n) for n in numbers]))
            bank.commit()


def is_right(bank: MemoryBank, index: list[int]) -> bool:
    """True if some entries of a bank of `fill` are read as what they are."""
    return torch.equal(bank.take(torch.tensor(index)), torch.cat([rows(number) for number in index]))


def allocated(folder: Path) -> int:
    """Bytes on the disk of all files in a folder."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
