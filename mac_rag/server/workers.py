"""Threads that do the work of requests: a bounded number at a time, in turns, and only as long as somebody waits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import JSONResponse, Response

from mac_rag.batching_queue import OWNER
from mac_rag.server.api_errors import APIError, closing

if TYPE_CHECKING:
    from starlette.requests import Request

_T = TypeVar("_T")


class ClientGoneError(Exception):
    """The client has closed its connection, so nobody will read the answer."""


class Workers:
    """A bounded number of threads for one kind of work. Work beyond the bound is refused at once.

    Keys do not hinder each other: the bounds hold for each `OWNER`, and a free thread serves the one with the fewest.

    Args:
        kind: the kind of work, for messages.
        most: most units of one owner's work that wait or run at a time; a question is one unit.
        seconds: longest time for one piece of work, including its wait; None for any time.
        running: most pieces of one owner's work that run at a time; None for `most`. There are twice as many threads.
    """

    def __init__(self, kind: str, most: int, seconds: float | None = None, running: int | None = None) -> None:
        self._kind = kind
        self._most = most
        self._seconds = seconds
        self._share = running or most
        self._pool = ThreadPoolExecutor(2 * self._share, thread_name_prefix=f"mac-rag-{kind}")
        self._lock = threading.Lock()
        self._closing = False
        self._futures: set[Future[Any]] = set()  # what waits or runs
        self._pending: Counter[str] = Counter()  # units of each owner
        self._running: Counter[str] = Counter()  # pieces of work of each owner
        self._waiting: dict[str, deque[Callable[[], object]]] = {}  # of each owner

    @property
    def pending(self) -> int:
        """Units of work that wait or run now."""
        return self._pending.total()

    async def respond(
        self,
        work: Callable[[Callable[[], bool]], object],
        connection: Request | None = None,
        *,
        units: int = 1,
        status: int = 200,
    ) -> Response:
        """As `run`; the response with the result as JSON, which is also written in the thread, as it may be long."""
        return await self.run(lambda gone: JSONResponse(work(gone), status), connection, units=units)

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
            waiting.cancel()  # it is not begun then
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

        def refuse(future: Future[None]) -> None:  # if the work has not ended by itself
            if not future.cancelled() and (error := future.exception()) is not None:
                put((True, error))  # type: ignore[arg-type]

        self._start(work, 1).add_done_callback(refuse)
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

    def give_up(self) -> None:
        """Ends all waiting and running work for those who wait for it, who get an error. No thread can be ended."""
        self.refuse()
        with self._lock:
            futures = list(self._futures)
        for future in futures:
            with suppress(InvalidStateError):
                future.set_exception(
                    closing("the server is closing; whether this was done is unknown, so look before you do it again")
                )

    def close(self, seconds: float) -> bool:
        """Refuses all further work, and waits so long for running work. Returns False if some goes on."""
        self.refuse()
        self._pool.shutdown(wait=False, cancel_futures=True)
        end = time.monotonic() + seconds
        while self._running.total() and time.monotonic() < end:
            time.sleep(0.01)
        return not self._running.total()

    def _start(self, work: Callable[[], _T], units: int) -> Future[_T]:
        owner = OWNER.get()
        future: Future[_T] = Future()
        with self._lock:
            if self._closing:
                raise closing("the server is closing, so nothing was done")
            mine = self._pending[owner]
            # A request that exceeds the bound by itself is taken if nothing else is pending.
            if mine and mine + units > self._most:
                raise APIError(
                    429,
                    f"{mine} {self._kind} wait or run, and {self._most} are the most; try again",
                    code="busy",
                    retry_after=1,
                )
            self._pending[owner] += units
            self._waiting.setdefault(owner, deque()).append(partial(copy_context().run, _finish, future, work))
            self._futures.add(future)
        future.add_done_callback(lambda _: self._give_back(owner, units, future))
        self._pool.submit(self._next)
        return future

    def _next(self) -> None:
        """Runs work of the owner that has the least running, until nobody has any who may have more."""
        while True:
            with self._lock:
                free = [owner for owner in self._waiting if self._running[owner] < self._share]
                if not free:
                    return
                owner = min(free, key=self._running.__getitem__)
                work = self._waiting[owner].popleft()
                # The next of equals is the one that waits longest.
                rest = self._waiting.pop(owner)
                if rest:
                    self._waiting[owner] = rest
                self._running[owner] += 1
            try:
                work()
            finally:
                with self._lock:
                    self._running -= Counter({owner: 1})

    def _give_back(self, owner: str, units: int, future: Future[Any]) -> None:
        with self._lock:
            self._futures.discard(future)
            self._pending -= Counter({owner: units})  # without what becomes zero

    def _late(self) -> APIError:
        return APIError(
            504, f"the request took more than {self._seconds:g} s; ask again, or ask for less", code="timeout"
        )


def _finish(future: Future[_T], work: Callable[[], _T]) -> None:
    """Runs work, unless it was cancelled, and gives the future its outcome."""
    if future.done() or not future.set_running_or_notify_cancel():  # given up, or cancelled
        return
    try:
        result = work()
    except BaseException as error:
        with suppress(InvalidStateError):  # it was given up
            future.set_exception(error)
    else:
        with suppress(InvalidStateError):
            future.set_result(result)


async def _watch(connection: Request) -> None:
    """Returns when the client has gone. Its request has been read completely, so no other message arrives."""
    while (await connection.receive())["type"] != "http.disconnect":
        pass
