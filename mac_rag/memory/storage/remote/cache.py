"""The local cache of banks behind URLs: what was fetched is kept for later runs, up to a bound.

    <cache folder>/remote/<sha256 of the URL>/
        lock                                    held for moments, while something takes its place here
        <segment>.<digest>/<segment>.jsonl      files that are fetched whole, compared with their digests
        <segment>.<digest>/rows                 the large file of the rows; see `range_file`

Several processes use it at once. A file is made under another name and renamed when it is whole. It is removed by its
name only, so whoever has it open reads on; that is how room is made, and how damage is mended. Nothing that was read
here is believed without its checksum.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar
from weakref import WeakKeyDictionary

from filelock import FileLock

from mac_rag.atomic_files import UNFINISHED, make_folder, private
from mac_rag.cache import CACHE_VARIABLE, LIMIT_VARIABLE, cache_folder, cache_limit
from mac_rag.errors import BankError, DamageError
from mac_rag.memory.storage.manifest import SegmentInfo
from mac_rag.memory.storage.remote.object_store import ObjectStore
from mac_rag.untrusted_files import MalformedError, file_digest

_Result = TypeVar("_Result")

_PIECE = 1 << 20
# The cache is measured again when this part of its bound was fetched since.
_MEASURED = 64
# Seconds after which a file that is not finished counts as left by a process that was killed.
_ABANDONED = 24 * 3600
# How often a file is fetched that another process removes at once to make room.
_ATTEMPTS = 5
# Segments that are fetched from at a time.
_THREADS = 16


class BankCache:
    """What is kept of one bank.

    Args:
        store: where its files come from.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.all = cache_folder() / "remote"
        self.folder = self.all / hashlib.sha256(store.url.encode()).hexdigest()[:32]
        self.limit = cache_limit()
        self._unmeasured = self.limit  # bytes that were fetched since the cache was measured
        self._counting, self._turn = threading.Lock(), threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="mac_rag-fetch")
        with self.errors():
            make_folder(self.folder)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turns errors of the file system into errors that name the cache."""
        try:
            yield
        except OSError as error:
            if str(error.filename).startswith(self.store.url):
                raise  # of a file that is missing there
            raise BankError(
                f"{self.folder}, the cache of {self.store.url}, cannot be used: {error}; make room there, or name a "
                f"folder on another disk ({CACHE_VARIABLE}) or a smaller bound ({LIMIT_VARIABLE})"
            ) from error

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps all other threads and processes from putting something into this bank's cache."""
        # Threads of this process wait for each other here, so that only other processes are asked again and again.
        with self._turn, FileLock(self.folder / "lock", mode=0o600, poll_interval=0.005):
            yield

    def segment_folder(self, info: SegmentInfo) -> Path:
        """The folder of a segment; another segment of the same name has another."""
        folder = self.folder / f"{info.name}.{info.tokens[:16]}"
        with self.errors():
            make_folder(folder)
        return folder

    def whole(self, folder: Path, name: str, digest: str) -> Path:
        """A whole file, from the cache if it is what its digest says.

        Raises:
            FileNotFoundError: when it is not behind the URL.
            DamageError: when what is there differs from the digest.
            BankError: when it cannot be fetched, or is larger than the cache.
        """
        path = folder / name
        with self.errors():
            if _digest(path) == digest:
                with suppress(FileNotFoundError):
                    os.utime(path)
                return path
        with self.errors(), _new_file(path) as file:
            self.store.download(name, file, self.limit)
            file.flush()
            unfinished = Path(file.name)
            if _digest(unfinished) != digest:
                raise DamageError(
                    f"{self.store.place(name)} differs from what the bank's manifest says; remove it, and put the bank "
                    "there again (mac-rag bank upload)"
                )
            self.make_room(unfinished.stat().st_size)
            unfinished.replace(path)
        return path

    def begin(self, call: Callable[[], object]) -> None:
        """Calls something in another thread; nobody is told how that ends."""
        with suppress(RuntimeError):  # when the process is about to end
            self._threads.submit(call)

    def make_room(self, need: int) -> None:
        """Removes what was fetched longest ago, until `need` more bytes fit.

        A process that has a removed file open keeps its bytes on the disk until it fetches more of that file, or ends.
        This process gives them back at once, unless another thread is reading the file.
        """
        with self._counting:
            self._unmeasured += need
            if self._unmeasured < self.limit // _MEASURED:
                return
            self._unmeasured = need
        files = sorted(_files(self.all))
        users: dict[Path, list[Droppable]] = {}
        for user, path in list(_paths.items()):
            users.setdefault(path, []).append(user)
        taken = sum(size for _, size, _ in files)
        for _, size, path in files:
            if taken + need <= self.limit:
                return
            if not size:
                continue
            if not all(user.drop() for user in users.get(path, ())):
                continue
            if path not in users:
                with suppress(OSError):
                    path.unlink()
            taken -= size


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A new file beside a path, which is removed at the end if it still has its name."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        with open(unfinished, "xb", opener=private) as file:
            yield file
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


class Droppable:
    """A file of the cache that an object of this process has mapped."""

    def drop(self) -> bool:
        """Begins the file anew, without any of its bytes; False if it is being read."""
        raise NotImplementedError


_paths: WeakKeyDictionary[Droppable, Path] = WeakKeyDictionary()


def use(path: Path, user: Droppable) -> None:
    """Is told of an object that maps a file."""
    _paths[user] = path


def _files(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """Time of the last change, bytes on the disk and path of each file in the caches of all banks.

    A file that is being made is none, until it has been that for so long that its process must have been killed.
    """
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with suppress(OSError):
                status = path.lstat()
                if name.endswith(UNFINISHED) and time.time() - status.st_mtime < _ABANDONED:
                    continue
                yield status.st_mtime, getattr(status, "st_blocks", -(-status.st_size // 512)) * 512, path


def _digest(path: Path) -> str | None:
    """Sha256 of a file; None if there is none, or something else in its place."""
    try:
        return file_digest(path)
    except (FileNotFoundError, MalformedError):
        return None


def attempts(call: Callable[[], _Result]) -> _Result:
    """Calls again what found that another process had just removed its files to make room.

    Raises:
        FileNotFoundError: of the last call.
    """
    for _ in range(_ATTEMPTS - 1):
        with suppress(FileNotFoundError):
            return call()
    return call()
