"""What is freed in front of a small object that lasts goes back to the system."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest

from mac_rag.server.app import returned_memory
from tests.helpers import wait_until

PIECES, SIZE = 16_000, 4_096  # 62 MiB


def resident() -> int:
    """MiB of this process's own memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) // 1024


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the functions are those of glibc")
def test_free_pages_between_objects_that_last_go_back() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [library.malloc(SIZE) for _ in range(PIECES)]
    for piece in pieces:
        ctypes.memset(piece, 1, SIZE)
    full = resident()
    last = pieces.pop()  # at the end, so that free does not give back what is in front of it
    for piece in pieces:
        library.free(piece)
    assert resident() > full - 10
    with returned_memory(every=0.05):
        wait_until(lambda: resident() < full - 50)
    library.free(last)
