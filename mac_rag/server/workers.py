"""Threads that do the work of requests: a bounded number at a time, and only as long as somebody waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from mac_rag.server.api_errors import APIError, closing

if TYPE_CHECKING:
    from starlette.requests import Request

_T = TypeVar("_T")


class ClientGoneError(Exception):
    """The client has closed its connection, so nobody will read the answer."""


class Workers:
    """A bounded number of threads for one kind of work. Work beyond the bound is refused at once.

    Args:
        kind: the kind of work, for messages.
        most: most units of work that wait or run at a time; a question is one unit.
        seconds: longest time for one piece of work, including its wait; None for any time.

    Attributes:
        pending: units of work that wait or run now.
    """

    def __init__(self, kind: str, most: int, seconds: float | None = None) -> None:
        self._kind = kind
        self._most = most
        self._seconds = seconds
        self._pool = ThreadPoolExecutor(most, thread_name_prefix=f"mac-rag-{kind}")
        self._lock = threading.Lock()
        self._closing = False
        self.pending = 0

    async def run(
        self, work: Callable[[Callable[[], bool]], _T], connection: Request | None = None, *, units: int = 1
    ) -> _T:
        """Runs work in a thread.

        Args:
            work: the work; called with a function that returns True once nobody waits for the result any more.
            connection: the request that waits; None to finish the work even if the client has gone.
            units: units of work that it counts as.

        Raises:
            APIError: 429 if too much work waits; 503 if the server is closing; 504 if the work takes too long.
            ClientGoneError: if the client has gone.
            Exception: any error that `work` raises.
        """
        gone = threading.Event()
        waiting = asyncio.wrap_future(self._start(lambda: work(gone.is_set), units))
        watching = None if connection is None else asyncio.create_task(_watch(connection))
        try:
            tasks: set[asyncio.Future[object]] = {waiting} if watching is None else {waiting, watching}  # type: ignore[arg-type]
            done, _ = await asyncio.wait(tasks, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
            if waiting in done:
                return waiting.result()
            if done:
                raise ClientGoneError
            raise self._late()
        finally:
            gone.set()
            waiting.add_done_callback(_ignore)
            if watching is not None:
                watching.cancel()

    async def stream(self, produce: Callable[[], Iterator[_T]]) -> AsyncGenerator[_T, None]:
        """Runs an iterator in a thread, and yields its items. The iterator ends early if nobody reads on.

        Raises:
            APIError: as `run`.
            Exception: any error that the iterator raises.
        """
        gone = threading.Event()
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[bool, _T | Exception | None]] = asyncio.Queue()

        def put(item: tuple[bool, _T | Exception | None]) -> None:
            if not gone.is_set():
                loop.call_soon_threadsafe(queue.put_nowait, item)

        def work() -> None:
            try:
                for piece in produce():
                    if gone.is_set():
                        return
                    put((False, piece))
                put((True, None))
            except Exception as error:
                put((True, error))

        self._start(work, 1)
        end = None if self._seconds is None else loop.time() + self._seconds
        try:
            while True:
                try:
                    async with asyncio.timeout_at(end):
                        ended, item = await queue.get()
                except TimeoutError:
                    raise self._late() from None
                if isinstance(item, Exception):
                    raise item
                if ended:
                    return
                yield item  # type: ignore[misc]
        finally:
            gone.set()

    def refuse(self) -> None:
        """Refuses all further work; running work is finished."""
        self._closing = True

    def close(self) -> None:
        """Refuses all further work, and waits for running work."""
        self.refuse()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start(self, work: Callable[[], _T], units: int) -> Future[_T]:
        with self._lock:
            if self._closing:
                raise closing("the server is closing, so nothing was done")
            # A request that exceeds the bound by itself is taken if nothing else is pending.
            if self.pending and self.pending + units > self._most:
                raise APIError(
                    429,
                    f"{self.pending} {self._kind} wait or run, and {self._most} are the most; try again",
                    code="busy",
                    retry_after=1,
                )
            self.pending += units
        try:
            future = self._pool.submit(work)
        except BaseException:
            self._give_back(units)
            raise
        future.add_done_callback(lambda _: self._give_back(units))
        return future

    def _give_back(self, units: int) -> None:
        with self._lock:
            self.pending -= units

    def _late(self) -> APIError:
        return APIError(
            504, f"the request took more than {self._seconds:g} s; ask again, or ask for less", code="timeout"
        )


async def _watch(connection: Request) -> None:
    """Returns when the client has gone. Its request has been read completely, so no other message arrives."""
    while (await connection.receive())["type"] != "http.disconnect":
        pass


def _ignore(future: asyncio.Future[Any]) -> None:
    """Retrieves the exception of work that nobody waits for, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()
