"""Errors of the file system that return: the n-th call that concerns a folder fails, or every call that needs space."""

from __future__ import annotations

import builtins
import errno
import io
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

# Calls by the name under which the code finds them. `write`, `flush` and `close` of a file count as well.
_CALLS = (
    "open", "fsync", "replace", "rename", "link", "unlink", "remove", "mkdir", "rmdir", "stat", "scandir", "listdir",
)  # fmt: skip
_NEED_SPACE = {"open to write", "write", "flush", "close written", "fsync", "mkdir"}


class Faults:
    """Counts the calls that concern a folder, and lets some of them fail.

    Args:
        folder: the folder.

    Attributes:
        calls: names of all calls so far.
        failed: the first call that failed; None for none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = os.fspath(folder)
        self._descriptors: dict[int, str] = {}
        self._fails: Callable[[int, str], OSError | None] = lambda number, name: None
        self.calls: list[str] = []
        self.failed: str | None = None

    def concerns(self, place: object) -> bool:
        if isinstance(place, int):
            return place in self._descriptors
        return isinstance(place, str | os.PathLike) and os.fspath(place).startswith(self._folder)

    def step(self, name: str, place: object) -> None:
        """Counts a call, and raises if it is one that is to fail."""
        if not self.concerns(place):
            return
        self.calls.append(name)
        if error := self._fails(len(self.calls), name):
            self.failed = self.failed or name
            raise error

    def done(self, name: str, place: object, *others: object) -> None:
        """Is told of each call that has succeeded, with its other arguments."""

    def path(self, place: Any) -> str:
        """The path that a call concerns, which may have named a descriptor."""
        return self._descriptors[place] if isinstance(place, int) else os.fspath(place)

    def at(self, number: int, error: int = errno.EIO) -> None:
        """Lets the call of this number fail, and no other."""
        self._fails = lambda n, name: OSError(error, os.strerror(error)) if n == number else None

    def full(self, number: int, error: int = errno.ENOSPC) -> None:
        """Lets every call that needs space fail from this number on."""
        self._fails = lambda n, name: (
            OSError(error, os.strerror(error)) if n >= number and name in _NEED_SPACE else None
        )

    def interrupt(self, number: int) -> None:
        """Interrupts the call of this number, as Ctrl-C does."""

        def fails(n: int, name: str) -> OSError | None:
            if n == number:
                self.failed = name
                raise KeyboardInterrupt
            return None

        self._fails = fails

    def heal(self) -> None:
        """Lets no call fail any more."""
        self._fails = lambda number, name: None


_Faults = TypeVar("_Faults", bound=Faults)


class _File:
    """An open file whose calls count."""

    def __init__(self, file: Any, faults: Faults, path: str, *, writes: bool) -> None:
        self._file, self._faults, self._path, self._writes = file, faults, path, writes

    def write(self, data: Any) -> Any:
        self._faults.step("write", self._path)
        return self._file.write(data)

    def flush(self) -> None:
        self._faults.step("flush", self._path)
        self._file.flush()
        self._faults.done("flush", self._path)

    def close(self) -> None:
        try:
            self._faults.step("close written" if self._writes else "close", self._path)
        finally:
            self._file.close()
        if self._writes:
            self._faults.done("close written", self._path)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def faults(folder: Path) -> Iterator[Faults]:
    """Watches the calls that concern a folder; nothing fails until it is told to."""
    with watching(Faults(folder)) as state:
        yield state


@contextmanager
def watching(state: _Faults) -> Iterator[_Faults]:
    """Tells `state` of the calls that concern its folder."""
    plain_open, plain_map = io.open, mmap.mmap

    def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if not state.concerns(path):
            return plain_open(path, mode, *arguments, **options)
        writes = not set(mode).isdisjoint("wax+")
        state.step("open to write" if writes else "open", path)
        file = plain_open(path, mode, *arguments, **options)
        name = state.path(path)
        state._descriptors[file.fileno()] = name
        if writes:
            state.done("open to write", name)
        return _File(file, state, name, writes=writes)

    def mapped(descriptor: int, *arguments: Any, **options: Any) -> mmap.mmap:
        state.step("mmap", descriptor)
        return plain_map(descriptor, *arguments, **options)

    def wrapped(name: str) -> Callable[..., Any]:
        plain = getattr(os, name)

        def call(place: Any = ".", *arguments: Any, **options: Any) -> Any:
            writes = name == "open" and bool(arguments and arguments[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            state.step("open to write" if writes else name, place)
            result = plain(place, *arguments, **options)
            if state.concerns(place):
                if name == "open":
                    state._descriptors[result] = os.fspath(place)
                state.done("open to write" if writes else name, place, *arguments)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        patch.setattr(mmap, "mmap", mapped)
        for name in _CALLS:
            patch.setattr(os, name, wrapped(name))
        yield state
