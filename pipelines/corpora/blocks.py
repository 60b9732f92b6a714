"""Token blocks of equal length on disk: texts cut into blocks, or whole sequences packed into them."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mac_rag.errors import DataError
from pipelines.corpora.text import Sequences

_OPEN = 64  # blocks that `pack` keeps open; more would save little padding


class Blocks(Sequences):
    """Blocks in one or several memory-mapped `.npy` files.

    Args:
        parts: token ids `[N_i, L]` of each file.
    """

    def __init__(self, parts: Sequence[NDArray[np.unsignedinteger]]) -> None:
        self._parts = [part for part in parts if len(part)]
        self._ends = list(accumulate(map(len, self._parts)))

    @classmethod
    def open(cls, paths: Sequence[Path]) -> Blocks:
        return cls([np.load(path, mmap_mode="r", allow_pickle=False) for path in paths])

    def split(self, held_out: int) -> tuple[Blocks, Blocks]:
        """All blocks but the last `held_out`, and these last ones.

        Raises:
            DataError: if there are no others.
        """
        first = len(self) - held_out
        if first < 1:
            raise DataError(f"validation_documents is {held_out}, but the corpus fills only {len(self)} sequences")
        starts = [end - len(part) for end, part in zip(self._ends, self._parts, strict=True)]
        pairs = list(zip(starts, self._parts, strict=True))
        before = [part[: max(0, first - start)] for start, part in pairs]
        behind = [part[max(0, first - start) :] for start, part in pairs]
        return Blocks(before), Blocks(behind)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def sequence(self, index: int, seed: int) -> list[int]:
        part = bisect_right(self._ends, index)
        ids: list[int] = self._parts[part][index - self._ends[part]].tolist()
        return ids


def write_blocks(path: Path, blocks: Iterable[Sequence[int]], length: int, vocabulary: int) -> None:
    """Writes blocks of `length` ids atomically, in 16 bits, or in 32 if the vocabulary needs them."""
    dtype = np.uint16 if vocabulary <= 2**16 else np.uint32
    rows = [np.asarray(block, dtype=dtype) for block in blocks]
    array = np.stack(rows) if rows else np.empty((0, length), dtype=dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(f".{os.getpid()}")
    with whole.open("wb") as file:
        np.save(file, array, allow_pickle=False)
    whole.replace(path)


def cut(rows: Iterable[Sequence[int]], length: int) -> Iterator[list[int]]:
    """Joins rows and cuts them into blocks; drops the rest at the end."""
    stream: list[int] = []
    for row in rows:
        stream.extend(row)
        whole = len(stream) // length * length
        yield from (stream[first : first + length] for first in range(0, whole, length))
        del stream[:whole]


def pack(rows: Iterable[Sequence[int]], length: int, pad: int) -> Iterator[list[int]]:
    """Sequence packing: puts each row whole into the fullest open block with room for it; blocks end in padding.

    A row longer than a block is cut at its end.
    """
    blocks: list[list[int]] = []
    for row in rows:
        row = list(row[:length])
        roomy = [block for block in blocks if len(block) + len(row) <= length]
        if roomy:
            max(roomy, key=len).extend(row)
            continue
        if len(blocks) == _OPEN:
            fullest = max(range(_OPEN), key=lambda i: len(blocks[i]))
            yield _padded(blocks.pop(fullest), length, pad)
        blocks.append(row)
    yield from (_padded(block, length, pad) for block in blocks)


def _padded(block: list[int], length: int, pad: int) -> list[int]:
    return block + [pad] * (length - len(block))
