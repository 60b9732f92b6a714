"""The calls to the system that concern a folder, of Python and of SQLite alike: counted, made to fail, and noted.

They pass through `interposer.c`, which has to be there from the start of the process: see `start_again`.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

FAIL_ONE, FAIL_SPACE, INTERRUPT, KILL = 1, 2, 3, 4
_PRELOADED = "MAC_RAG_INTERPOSER"


def preloading() -> dict[str, str]:
    """The environment of a process whose calls can be watched. Compiles the interposer."""
    library = Path(tempfile.mkdtemp(prefix="interposer-")) / "interposer.so"
    source = Path(__file__).with_name("interposer.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl", "-lpthread"], check=True)
    return {**os.environ, "LD_PRELOAD": str(library), _PRELOADED: str(library)}


def start_again() -> None:
    """Starts this program again with the interposer, unless it is there."""
    if _PRELOADED not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], preloading())


def _library() -> Any:
    library = ctypes.CDLL(None)
    library.torture_calls.restype = library.torture_failures.restype = ctypes.c_long
    library.torture_used.restype = ctypes.c_size_t
    library.torture_events.restype = ctypes.c_void_p
    return library


class Event(NamedTuple):
    """What a call did, with paths relative to the folder.

    Attributes:
        kind: `w` wrote, `t` truncated, `s` synced a file, `d` synced a folder, `r` renamed, `u` removed, `c` created.
        path: what it concerned.
        other: the new name.
        offset: where it wrote, or the new size.
        data: what it wrote.
    """

    kind: str
    path: str
    other: str
    offset: int
    data: bytes


class System:
    """Watches the calls that concern a folder.

    Args:
        folder: the folder.
        record: True to note what they do.
    """

    def __init__(self, folder: Path, *, record: bool = False) -> None:
        self._folder, self._library = folder, _library()
        self._library.torture_watch(os.fsencode(folder), int(record))

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return int(self._library.torture_calls())

    @property
    def failures(self) -> int:
        """The number of calls that failed."""
        return int(self._library.torture_failures())

    def fault(self, how: int, number: int, error: int = 0) -> None:
        """Lets the call of a number fail, or all from it on that need space; or interrupts or kills the process."""
        self._library.torture_fault(how, ctypes.c_long(number), error)

    def heal(self) -> None:
        """Lets no call fail any more."""
        self.fault(0, 0)

    @property
    def event_count(self) -> int:
        """Bytes of what was noted, which grows with every event."""
        return int(self._library.torture_used())

    def events(self) -> tuple[list[Event], list[int]]:
        """What was noted, and for each event the bytes of what was noted until it ended."""
        data = ctypes.string_at(self._library.torture_events(), self.event_count) if self.event_count else b""
        header = struct.Struct("<cIIqQ")
        found, ends, place = [], [], 0
        while place < len(data):
            kind, first, second, offset, size = header.unpack_from(data, place)
            place += header.size
            path, other = (os.fsdecode(data[place : place + first]), os.fsdecode(data[place + first :][:second]))
            place += first + second
            content = b""
            if kind == b"w":
                content = data[place : place + size]
                place += size
            names = [os.path.relpath(each, self._folder) if each else "" for each in (path, other)]
            found.append(Event(kind.decode(), *names, offset, content))
            ends.append(place)
        return found, ends

    def stop(self) -> None:
        """Watches nothing any more."""
        self._library.torture_watch(b"", 0)


@contextmanager
def watching(folder: Path, *, record: bool = False) -> Iterator[System]:
    """Watches the calls that concern a folder."""
    system = System(folder, record=record)
    try:
        yield system
    finally:
        system.stop()
