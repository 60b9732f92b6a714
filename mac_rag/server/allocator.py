"""Main memory that a busy server holds and does not use, and how it goes back to the system."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_M_ARENA_MAX = -8  # of malloc.h


@contextmanager
def returned_memory(every: float = 10.0) -> Iterator[None]:
    """Within the `with` block, what the process has freed goes back to the system. For glibc; elsewhere without effect.

    Dozens of threads compute one after the other, each batch in tensors of other sizes. glibc gives each thread an
    arena of its own, in which what one thread frees is of no use to the others, so threads share two. And it gives back
    only what is free at the end of an arena; so a small object that lasts keeps all that was freed in front of it. A
    call every few seconds gives back all whole pages that are free, within some 10 ms. (Large tensors in mappings of
    their own, by M_MMAP_THRESHOLD, would do it as well, and make answers a fifth slower.)

    Args:
        every: seconds between two times.
    """
    library = _glibc()
    if library is None:
        yield
        return
    library.mallopt(_M_ARENA_MAX, 2)
    end = threading.Event()

    def give_back() -> None:
        while not end.wait(every):
            library.malloc_trim(0)  # without the interpreter's lock, so others run on

    thread = threading.Thread(target=give_back, name="mac-rag-memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _glibc() -> ctypes.CDLL | None:
    """The C library of this process, if it has glibc's functions."""
    with suppress(AttributeError, OSError, TypeError):  # TypeError: on Windows a library must have a name
        library = ctypes.CDLL(None)
        library.mallopt.argtypes, library.malloc_trim.argtypes = [ctypes.c_int, ctypes.c_int], [ctypes.c_size_t]
        return library
    return None
