"""Runs the server until it is told to end."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from mac_rag.server.app import make_app
from mac_rag.server.service import Service

# How long requests under way may take when the server ends; a question has its own bound.
_GRACE = 90


class Server(uvicorn.Server):
    """Uvicorn, which tells the service when it begins to end, so that what arrives on open connections is refused.

    Args:
        service: banks, keys and threads.
        host, port: where it listens; port 0 for a free one.
        anyone, any_host: see `make_app`.
    """

    def __init__(self, service: Service, *, host: str, port: int, anyone: bool = False, any_host: bool = False) -> None:
        self._service = service
        super().__init__(
            uvicorn.Config(
                make_app(service, anyone=anyone, any_host=any_host),
                host=host,
                port=port,
                access_log=False,  # its lines hold what clients send; the gate writes its own
                log_level="warning",
                proxy_headers=False,
                server_header=False,
                ws="none",
                timeout_keep_alive=15,
                timeout_graceful_shutdown=_GRACE,
                limit_concurrency=1_000,
                h11_max_incomplete_event_size=32 << 10,
                http="h11",
            )
        )

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            _log.info("ready at http://%s:%d/", f"[{host}]" if ":" in host else host, port)

    async def shutdown(self, sockets: Any = None) -> None:
        self._service.refuse_new_work()
        await super().shutdown(sockets)


def run(service: Service, *, host: str, port: int, anyone: bool, any_host: bool) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for noisy in ("httpx", "mcp", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with returned_memory():
        server = Server(service, host=host, port=port, anyone=anyone, any_host=any_host)
        try:
            server.run()
        finally:
            service.close()


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
