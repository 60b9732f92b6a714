"""Functions in processes of their own, forked from one that stands by from before the first test."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

_FORK = multiprocessing.get_context("fork")
_server: Connection


@contextmanager
def forking() -> Iterator[None]:
    """Forks a process that `run_in_process` uses. This one must have no threads yet, which do not come along."""
    global _server
    _server, served = _FORK.Pipe()
    process = _FORK.Process(target=_serve, args=(served, _server))
    process.start()
    served.close()
    yield
    _server.close()
    process.join()


def _serve(asked: Connection, other_end: Connection) -> None:
    other_end.close()  # so that it is told when nobody will ask any more
    with suppress(EOFError):
        while True:
            function, args, kwargs = asked.recv()
            process = _FORK.Process(target=function, args=args, kwargs=kwargs)
            process.start()
            process.join(240)
            process.kill()  # without effect, unless it hangs
            process.join()
            asked.send(process.exitcode)


def run_in_process(function: Callable[..., object], *args: object, **kwargs: object) -> int | None:
    """Runs a function of a module in a process of its own, which may be killed; returns its exit code.

    It is forked from a process without threads that has imported what the tests import, so that it starts at once.
    """
    _server.send((function, args, kwargs))
    return _server.recv()
