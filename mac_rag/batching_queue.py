"""A queue in which threads take turns, and requests that wait together share one."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, TypeVar

from mac_rag.errors import CancelledError

_Request = TypeVar("_Request")
_Result = TypeVar("_Result")

# On whose behalf a thread waits, such as the name of a client's key. Owners share the time, not the turns.
OWNER: ContextVar[str] = ContextVar("OWNER", default="")
# As long as another owner had a turn within so many seconds, one owner's part of a batch is at most so large, because
# whoever comes next waits for the whole batch.
_SHARED, _LARGEST_PART = 30.0, 4
# Seconds that a turn lasts at least before it gives way to an owner that has used less time.
_UNDISTURBED = 0.01
# Before a batch begins, its thread lets the others run until so many times in a row none of them has brought a request.
# So a crowd that comes at once is not cut in two. A thread that is alone loses a fraction of a millisecond.
_IDLE_YIELDS = 2
# How often a batch waits for `patience` at most, however many requests come meanwhile.
_PATIENT_ROUNDS = 5

# What runs a batch: all at once, or in steps.
Run = Callable[["Batch[Any]"], Sequence[Any] | Generator[None, None, None]]


@dataclass(eq=False)
class _Entry:
    """A thread's place in the queue: for a turn of its own, or for a request.

    Attributes:
        request, run, group, size, joins: of `BatchingQueue.submit`; a turn of its own has the group None.
        outcome: what the request gave: a result or an exception.
        done: True once there is an outcome.
        abandoned: True once its thread has stopped waiting.
        cancelled: True once nobody waits for the outcome any more; None if somebody always does.
        soon: True for a short turn, such as a retrieval.
        owner: `OWNER` of the thread.
        inherited: the batch with which its thread is to go on, because another one has left it.
    """

    request: Any = None
    run: Run | None = None
    group: Hashable = None
    joins: Hashable = None
    size: int = 1
    outcome: Any = None
    done: bool = False
    abandoned: bool = False
    cancelled: Callable[[], bool] | None = None
    soon: bool = False
    thread: int = field(default_factory=threading.get_ident)
    owner: str = field(default_factory=OWNER.get)
    inherited: _Running | None = None

    @property
    def waits(self) -> bool:
        """True as long as its thread waits for an outcome that there is not yet."""
        return not self.done and not self.abandoned

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled is not None and self.cancelled()


@dataclass(eq=False)
class _Running:
    """A batch that runs.

    Attributes:
        entries: its requests, and all that have joined them.
        limit: as `BatchingQueue.submit` takes it.
        joins: what may join it; None if nothing may.
        steps: runs it.
    """

    entries: list[_Entry]
    limit: int
    joins: Hashable = None
    steps: Generator[None, None, None] = field(init=False)


class Batch(Sequence[_Request]):
    """Requests that run together.

    `finish` gives one its outcome while the others still run.
    """

    def __init__(
        self,
        entries: list[_Entry],
        finish: Callable[[_Entry, Any], None],
        joining: Callable[[], list[Batch[Any]]] = list,
    ) -> None:
        self._entries = entries
        self._finish = finish
        self._joining = joining

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, place: Any) -> Any:
        return self._entries[place].request

    def finish(self, place: int, outcome: Any) -> None:
        """Gives the request at this place its result, or its exception; its thread need not wait for the batch."""
        self._finish(self._entries[place], outcome)

    def joining(self) -> list[Batch[Any]]:
        """Takes requests in that wait and may join, in a batch for each group; they count as this one's from now on."""
        return self._joining()


class BatchingQueue:
    """Gives one thread at a time its turn, the one that has waited longest. Requests that wait together share a turn.

    Of several owners that wait, the one that has used the least time comes first.

    There is no thread behind it: the thread whose turn it is runs its own request, together with all that wait with the
    same group. While it does, requests arrive, and they become the next batches. So a request that comes alone runs at
    once, and the more threads there are, the larger the batches.

    A batch may run in steps. Between two of them, an owner that has used less time has its turn, so that nobody waits
    for all of another's work, and requests that have come meanwhile may join. A thread whose own request is done leaves
    the rest to another one that still waits.

    A thread that has its turn may ask for another one, and gets it at once.

    Attributes:
        patience: seconds without a new request after which a batch begins, if the batch before it had several. For
            requests that arrive over a network, one behind the other; 0 for none.

    Examples:
        >>> queue = BatchingQueue()
        >>> queue.submit(lambda numbers: [number + 1 for number in numbers], 1, group="add", size=1, limit=32)
        2
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._waiting: deque[_Entry] = deque()
        self._holder: _Entry | None = None
        self._used: dict[str, float] = {}  # seconds of each owner's turns; who was away does not save them up
        self._level = 0.0  # what the owner of the last turn had used before it
        self._paying: list[str] = []  # the owners of what runs in the present turn
        self._began = 0.0  # time of the last turn's begin
        self._last: dict[str, float] = {}  # time of each owner's last turn
        self._last_batch = 1  # requests
        self.patience = 0.0

    @property
    def is_shared(self) -> bool:
        """True if somebody else than this thread's owner has had a turn lately."""
        since = time.monotonic() - _SHARED
        return any(last > since for owner, last in list(self._last.items()) if owner not in ("", OWNER.get()))

    @contextmanager
    def turn(self, soon: bool = False) -> Iterator[None]:
        """A turn that is shared with nobody; with `soon`, a short one, for which long ones of its owner give way."""
        if self.is_mine:
            yield
            return
        entry = _Entry(soon=soon)
        try:
            self._wait(entry)
            yield
        finally:
            self._leave(entry)

    def submit(
        self,
        run: Callable[[Batch[_Request]], Sequence[_Result | Exception] | Generator[None, None, None]],
        request: _Request,
        *,
        group: Hashable,
        size: int,
        limit: int,
        joins: Hashable = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> _Result:
        """Runs a request, in one batch with those of other threads that wait, and returns its result.

        Args:
            run: from a batch of requests to their results, in the same order. A request that fails alone gives an
                exception instead of its result. One that is finished before (`Batch.finish`) keeps that outcome. Or a
                generator that runs the batch in steps, whichever thread goes on with it, and finishes all requests.
            request: the request.
            group: requests of equal groups may share a batch; the `run` of any of them runs it. Not None.
            size: size of the request.
            limit: largest size of a batch, unless a single request is larger.
            joins: requests of whatever group may join a batch that runs in steps (`Batch.joining`) if this is equal for
                both; None for a request that joins none.
            cancelled: True once nobody waits for the result any more. A request that still waits then is not run. It
                must be quick, and is asked whenever the queue moves.

        Raises:
            CancelledError: when `cancelled` said so before the request was run.
            Exception: the one that `run` gave for this request, or raised for its batch. What ends a single thread, as
                `KeyboardInterrupt`, is no such exception: another thread runs the rest of the batch again.
        """
        entry = _Entry(request, run, group, joins, size, cancelled=cancelled)
        if self.is_mine:
            for _ in self._steps(nested := _Running([entry], limit), run):
                pass
            own: _Result = _result(nested.entries[0].outcome)
            return own
        try:
            if self._wait(entry):
                self._go_on(entry, entry.inherited or self._begin(entry, run, limit))
        finally:
            self._leave(entry)
        result: _Result = _result(entry.outcome)
        return result

    @property
    def is_mine(self) -> bool:
        """True if it is this thread's turn."""
        holder = self._holder
        return holder is not None and holder.thread == threading.get_ident()

    @property
    def is_owed(self) -> bool:
        """True if this turn should give way: to an owner that has used less time, or to a short turn of its own."""
        if not self._waiting:
            return False
        with self._changed:
            lasted = time.monotonic() - self._began
            if self._holder is None:
                return False
            least = min(self._used[owner] for owner in self._paying) + lasted / len(self._paying)
            return any(
                entry.soon if entry.owner in self._paying else lasted > _UNDISTURBED and self._used_by(entry) < least
                for entry in self._waiting
                if not entry.is_cancelled
            )

    def give_way(self) -> bool:
        """Lets those who are owed a turn have it now, and goes on with this thread's turn after them.

        To be called between two steps of a turn, when nothing of the model depends on the thread that uses it.

        Returns:
            True if others have had a turn.
        """
        if not self.is_mine or not self.is_owed:
            return False
        holder, paying = self._holder, self._paying
        again = _Entry(owner=min(paying, key=self._used.__getitem__))
        try:
            with self._changed:
                self._end_turn()
                # Nothing else of its owner begins before, so that few batches are in memory at a time.
                soon = [entry for entry in self._waiting if entry.soon and entry.owner in paying]
                for entry in soon:
                    self._waiting.remove(entry)
                self._waiting.extendleft(reversed([*soon, again]))
                self._changed.notify_all()
                self._wait_for_turn(again)
                self._holder, self._paying = holder, paying
        except BaseException:
            self._leave(again)
            raise
        return True

    def _wait(self, entry: _Entry) -> bool:
        """Waits until it is the entry's turn (True), or another thread has run its request (False)."""
        with self._changed:
            self._used[entry.owner] = max(self._used.get(entry.owner, 0.0), self._level)
            self._waiting.append(entry)
            return self._wait_for_turn(entry)

    def _wait_for_turn(self, entry: _Entry) -> bool:
        while not entry.done:
            if entry.inherited is not None:
                return True
            if entry.is_cancelled and entry in self._waiting:
                raise CancelledError("nobody waits for this request any more, so it was not run")
            if self._holder is None and min(self._waiting, key=self._used_by) is entry:  # the first one of equals
                self._waiting.remove(entry)
                self._holder, self._paying = entry, [entry.owner]
                self._level, self._began = self._used[entry.owner], time.monotonic()
                return True
            self._changed.wait()
        return False

    def _used_by(self, entry: _Entry) -> float:
        return self._used[entry.owner]

    def _leave(self, entry: _Entry) -> None:
        """Ends the entry's turn, or its wait if an exception has interrupted it."""
        with self._changed:
            entry.abandoned = True
            orphan = entry.inherited if self._holder is entry else None
            if orphan is not None and self._pass_on(orphan):
                return
            if self._holder is entry and orphan is None:
                self._end_turn()
            elif entry in self._waiting:
                self._waiting.remove(entry)
            self._changed.notify_all()
        if orphan is not None:  # nobody goes on with it
            orphan.steps.close()
            with self._changed:
                self._end_turn()
                self._changed.notify_all()

    def _end_turn(self) -> None:
        self._charge()
        self._holder = None

    def _charge(self) -> None:
        """Charges the present turn so far to its owners."""
        now = time.monotonic()
        for owner in self._paying:
            self._used[owner] += (now - self._began) / len(self._paying)
            self._last[owner] = now
        self._began = now

    def _finish(self, entry: _Entry, outcome: Any) -> None:
        """Gives an entry its outcome, once; its owner does not pay for the rest of the turn, unless it is the last."""
        with self._changed:
            if entry.done:
                return
            entry.outcome, entry.done = outcome, True
            if entry.owner in self._paying and len(self._paying) > 1:
                self._charge()
                self._paying.remove(entry.owner)
            self._changed.notify_all()

    def _begin(self, first: _Entry, run: Run, limit: int) -> _Running:
        """The batch of the request whose turn it is, and of those that wait with the same group."""
        self._let_arrive(first, limit - first.size)
        running = _Running([first], limit, first.joins)
        running.steps = self._steps(running, run)
        with self._changed:
            own = [entry for entry in self._waiting if entry.group == first.group and not entry.is_cancelled]
            running.entries += self._admitted(running, own)
            self._paying = [entry.owner for entry in running.entries]
            self._last_batch = len(running.entries)
        return running

    def _steps(self, running: _Running, run: Run) -> Generator[None, None, None]:
        """Runs a batch, and gives each of its requests an outcome."""
        first = list(running.entries)
        try:
            outcomes = run(Batch(first, self._finish, lambda: self._joining(running)))
            if isinstance(outcomes, Generator):
                yield from outcomes
            else:
                for entry, outcome in zip(first, outcomes, strict=True):
                    self._finish(entry, outcome)
        except Exception as error:
            for entry in running.entries:
                self._finish(entry, error)

    def _go_on(self, leader: _Entry, running: _Running) -> None:
        """Goes on with a batch until it is over, or until another thread does because the leader's request is done."""
        leader.inherited = None
        try:
            for _ in running.steps:
                if leader.done:
                    with self._changed:
                        passed_on = self._pass_on(running)
                    if not passed_on:
                        running.steps.close()  # nobody waits for the rest
                    return
                self.give_way()
        except BaseException:  # this thread alone is to end
            running.steps.close()
            with self._changed:
                rest = [entry for entry in running.entries if entry is not leader and entry.waits]
                self._waiting.extendleft(reversed(rest))
            raise

    def _pass_on(self, running: _Running) -> bool:
        """Leaves a batch, and the turn, to a thread that waits for one of its requests; False if none does."""
        heir = next((entry for entry in running.entries if entry.waits), None)
        if heir is None:
            return False
        self._holder, heir.inherited = heir, running
        self._changed.notify_all()
        return True

    def _joining(self, running: _Running) -> list[Batch[Any]]:
        """Moves requests that may join from the queue to a batch that runs; returns them by groups."""
        if running.joins is None or not self._waiting:
            return []
        with self._changed:
            # Whoever would come next and cannot join must not wait for one after another who can. Short turns do not
            # wait for the end.
            asking = [entry for entry in self._waiting if not entry.is_cancelled and not entry.soon]
            share = (time.monotonic() - self._began) / len(self._paying)
            waiting = sorted(asking, key=lambda one: self._used_by(one) + share * self._paying.count(one.owner))
            joined = self._admitted(running, list(takewhile(lambda one: one.joins == running.joins, waiting)))
            if joined:
                self._charge()
                # Who comes later has saved nothing up while this turn went on.
                self._level = max(self._level, min(self._used[owner] for owner in self._paying))
                running.entries += joined
                self._paying = [entry.owner for entry in running.entries if entry.waits]
        groups = list(dict.fromkeys(entry.group for entry in joined))
        return [Batch([one for one in joined if one.group == group], self._finish) for group in groups]

    def _let_arrive(self, first: _Entry, room: int) -> None:
        """Lets other threads run as long as they bring requests that fit in one batch with the first."""
        seen, idle = -1, 0
        while idle < _IDLE_YIELDS and len(self._waiting) < room:
            idle = idle + 1 if len(self._waiting) == seen else 0
            seen = len(self._waiting)
            time.sleep(0)
        seen, rounds = -1, _PATIENT_ROUNDS if self.patience and self._last_batch > 1 else 0
        while rounds and seen < len(self._waiting) < room:
            if any(entry.group != first.group for entry in list(self._waiting)):
                return  # it would wait in vain
            seen, rounds = len(self._waiting), rounds - 1
            time.sleep(self.patience)

    def _admitted(self, running: _Running, waiting: Sequence[_Entry]) -> list[_Entry]:
        """Takes requests from the queue that have room in a batch, the first ones first."""
        size, parts = 0, dict[str, int]()
        for entry in running.entries:
            if entry.waits:
                size, parts[entry.owner] = size + entry.size, parts.get(entry.owner, 0) + entry.size
        most = _LARGEST_PART if self.is_shared else math.inf
        admitted: list[_Entry] = []
        for entry in waiting:
            part = parts.get(entry.owner, 0) + entry.size
            if part > most and entry.owner in parts:
                continue
            size += entry.size
            if size > running.limit:
                break
            parts[entry.owner] = part
            self._waiting.remove(entry)
            admitted.append(entry)
        return admitted


def isolating_errors(
    run: Callable[[Sequence[_Request]], Sequence[_Result]], requests: Sequence[_Request]
) -> Sequence[_Result | Exception]:
    """Runs a batch, or, if that raises an exception, each of its requests alone, so that it hits only its own."""
    try:
        return run(requests)
    except Exception as error:
        if len(requests) == 1:
            return [error]
        return [outcome for request in requests for outcome in isolating_errors(run, [request])]


def _result(outcome: _Result | Exception) -> _Result:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
