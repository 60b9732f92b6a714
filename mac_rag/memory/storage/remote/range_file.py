"""A large file behind a URL as a sparse file in the cache: mapped as a whole, fetched in blocks, before they are read.

    bytes of the file     those that were fetched; the rest are holes
    one byte a block      1 if the block is there

A block of a file in the cache is written once, under the cache's lock, and then never again: other processes may have
read it, and verified what they read. So what turns out to be wrong is not overwritten. The file loses its name, and a
new one begins. A killed process can leave a block without its mark, which is fetched again; a loss of power can leave a
mark without its block, which the checksums of the rows show.
"""

from __future__ import annotations

import mmap
import os
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from mac_rag.atomic_files import UNFINISHED, private
from mac_rag.errors import DamageError
from mac_rag.memory.storage.remote.cache import BankCache, Droppable, use
from mac_rag.memory.storage.remote.object_store import Range

BLOCK = 64 << 10
# Blocks that are there, or not needed, between two that are needed: they are fetched along, to make one request of two.
_GAP = 2
_BATCH = 64 << 20
# Bytes of a file, by far more than is ever written; what says which blocks are there stays small.
_LARGEST = 1 << 42


class RangeFile(Droppable):
    """A file behind a URL, of which those ranges are there that `bring` was called with.

    Args:
        cache: the cache of the bank.
        folder: the folder of its segment in the cache.
        name: name of the file behind the URL.
        size: its bytes.

    Attributes:
        content: the mapped file; what was never brought is zeros. `bring`, `renew` and `drop` may replace it.
        epoch: how often it was replaced.
        lock: to be held from `bring` until the bytes were taken out of `content`.

    Raises:
        BankError: when the cache cannot be used.
        DamageError: for a size beyond all bounds.
    """

    def __init__(self, cache: BankCache, folder: Path, name: str, size: int) -> None:
        if size > _LARGEST:
            raise DamageError(
                f"{cache.store.place(name)} has {size:,} bytes by its manifest; {_LARGEST:,} are the most"
            )
        self.epoch = 0
        self.lock = threading.RLock()
        self._cache = cache
        self._path = folder / "rows"
        self._name = name
        self._size = size
        self._blocks = -(-size // BLOCK)
        self._identity = (0, 0)
        self.content = self._map()
        use(self._path, self)

    def bring(self, ranges: Iterable[tuple[int, int]]) -> bool:
        """Makes sure that some ranges are there.

        Args:
            ranges: first byte, and first byte behind it, of each.

        Returns:
            False if the file had to begin anew instead: another process has removed it, or it is itself the one that
            has to make room. Then nothing is there.

        Raises:
            FileNotFoundError: when the file is not behind the URL any more.
            BankError: when it cannot be fetched, or the cache cannot be written.
        """
        missing = np.zeros(self._blocks, dtype=bool)
        for start, stop in ranges:
            missing[start // BLOCK : -(-stop // BLOCK)] = True
        with self.lock:
            with self._opened() as file:
                if file is None:
                    return self._begin_anew()
                missing &= ~self._marks(file)
            runs, epoch = _runs(missing.nonzero()[0], _GAP), self.epoch
            if not runs:
                return True
            self._cache.make_room(sum(stop - start for start, stop in runs) * BLOCK)
            if self.epoch != epoch:
                return False
            for batch in _batches(runs):
                places = [(first * BLOCK, min(stop * BLOCK, self._size)) for first, stop in batch]
                fetched = self._cache.store.ranges([Range(self._name, *place) for place in places])
                if not self._keep(batch, fetched):
                    return self._begin_anew()
        return True

    def _keep(self, runs: Sequence[tuple[int, int]], fetched: Sequence[bytes]) -> bool:
        """Writes what was fetched of some runs of blocks; False if the file has lost its name."""
        with self._cache.errors(), self._cache.lock(), self._opened() as file:
            if file is None:
                return False
            for (first, stop), data in zip(runs, fetched, strict=True):
                self._write(file, first, stop, data)
        return True

    def renew(self) -> None:
        """Begins the file anew, because what is there is wrong. Those who have it mapped keep what they have."""
        with self.lock:
            with self._cache.errors(), self._cache.lock():
                if self._is_current():
                    self._path.unlink(missing_ok=True)
            self._begin_anew()

    def drop(self) -> bool:
        """As `Droppable.drop`."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            self.renew()
        finally:
            self.lock.release()
        return True

    def _begin_anew(self) -> bool:
        self.content = self._map()
        self.epoch += 1
        return False

    def _map(self) -> mmap.mmap:
        """Maps the file of the cache; makes it if there is none."""
        with self._cache.errors(), self._cache.lock():
            descriptor = self._open()
            if descriptor is None:
                self._make()
                descriptor = self._open()
                assert descriptor is not None
            try:
                self._identity = _identity(os.fstat(descriptor))
                with suppress(OSError):
                    os.utime(self._path)
                # A private mapping, because torch has no read-only tensors. It shows what is written to the file as
                # long as nobody writes to the mapping, and nobody does.
                return mmap.mmap(descriptor, self._size, access=mmap.ACCESS_COPY)
            finally:
                os.close(descriptor)

    def _make(self) -> None:
        """Puts a new file of holes in the place of whatever has its name."""
        unfinished = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}{UNFINISHED}")
        with open(unfinished, "xb", opener=private) as file:
            try:
                file.truncate(self._size + self._blocks)
                unfinished.replace(self._path)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise

    def _open(self) -> int | None:
        """A descriptor of the file; None if there is none, or something that this class has not made."""
        flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
        flags |= getattr(os, "O_BINARY", 0)
        try:
            descriptor = os.open(self._path, flags)
        except OSError:
            return None
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size == self._size + self._blocks:
            return descriptor
        os.close(descriptor)
        return None

    @contextmanager
    def _opened(self) -> Iterator[int | None]:
        """A descriptor of the file that is mapped; None if it has lost its name."""
        descriptor = self._open()
        try:
            if descriptor is not None and _identity(os.fstat(descriptor)) == self._identity:
                yield descriptor
            else:
                yield None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _is_current(self) -> bool:
        with self._opened() as file:
            return file is not None

    def _marks(self, file: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which blocks are there, bool `[blocks]`."""
        os.lseek(file, self._size, os.SEEK_SET)
        marks = os.read(file, self._blocks).ljust(self._blocks, b"\0")
        there: np.ndarray[Any, np.dtype[np.bool_]] = np.frombuffer(marks, dtype=np.uint8) != 0
        return there

    def _write(self, file: int, first: int, stop: int, data: bytes) -> None:
        """Writes those of some blocks that are not there yet, and then their marks."""
        for begin, end in _runs(first + (~self._marks(file)[first:stop]).nonzero()[0], 0):
            piece = memoryview(data)[(begin - first) * BLOCK : (end - first) * BLOCK]
            _write_all(file, piece, begin * BLOCK)
            _write_all(file, memoryview(b"\1" * (end - begin)), self._size + begin)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _write_all(file: int, data: memoryview, place: int) -> None:
    os.lseek(file, place, os.SEEK_SET)
    while data:
        data = data[os.write(file, data) :]


def _runs(blocks: np.ndarray[Any, np.dtype[np.int64]], gap: int) -> list[tuple[int, int]]:
    """Ascending blocks as runs, first block and first block behind; runs with up to `gap` blocks between become one."""
    if not len(blocks):
        return []
    ends = (np.diff(blocks) > gap + 1).nonzero()[0]
    firsts, lasts = blocks[np.append(0, ends + 1)], blocks[np.append(ends, len(blocks) - 1)]
    return list(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True))


def _batches(runs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Runs in groups of bounded size; a longer run is divided."""
    most = _BATCH // BLOCK
    batch: list[tuple[int, int]] = []
    size = 0
    for first, stop in runs:
        for begin in range(first, stop, most):
            end = min(begin + most, stop)
            if batch and size + end - begin > most:
                yield batch
                batch, size = [], 0
            batch.append((begin, end))
            size += end - begin
    if batch:
        yield batch
