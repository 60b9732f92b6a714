"""The batching queue: turns, batches, and what happens when something goes wrong in one of them."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.batching_queue import OWNER, Batch, BatchingQueue, isolating_errors
from mac_rag.errors import CancelledError
from tests.helpers import wait_until


class Worker:
    """Runs batches and notes them; the first one waits for `go`, so that requests arrive meanwhile."""

    def __init__(self) -> None:
        self.queue = BatchingQueue()
        self.batches: list[list[Any]] = []
        self.begun, self.go = threading.Event(), threading.Event()
        self.pool = ThreadPoolExecutor(32)

    def run(self, requests: Sequence[Any]) -> Sequence[Any]:
        self.batches.append(list(requests))
        self.begun.set()
        assert self.go.wait(20)
        return [f"done {request}" for request in requests]

    def start(self, request: Any, group: str = "a", size: int = 1, limit: int = 32, run: Any = None) -> Future[Any]:
        """Submits a request from a thread of its own."""
        return self.pool.submit(
            lambda: self.queue.submit(run or self.run, request, group=group, size=size, limit=limit)
        )

    def start_and_wait(self, request: Any, **options: Any) -> Future[Any]:
        """As `start`; returns when the request waits in the queue."""
        count = len(self.queue._waiting)
        future = self.start(request, **options)
        wait_until(lambda: len(self.queue._waiting) == count + 1)
        return future

    def start_first(self, request: Any = "first", **options: Any) -> Future[Any]:
        """Submits a request that runs until `go`."""
        future = self.start(request, **options)
        assert self.begun.wait(20)
        return future


pytestmark = pytest.mark.usefixtures("interruptible")


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.go.set()
    worker.pool.shutdown()
    assert worker.queue._holder is None
    assert not worker.queue._waiting


def test_groups_are_not_mixed_and_the_oldest_request_decides_which_comes_next(worker: Worker) -> None:
    worker.start_first(group="a")
    for name in ("b1", "a1", "b2", "c1", "a2"):
        worker.start_and_wait(name, group=name[0])
    worker.go.set()
    wait_until(lambda: len(worker.batches) == 4)
    assert worker.batches == [["first"], ["b1", "b2"], ["a1", "a2"], ["c1"]]


def test_a_batch_stays_within_its_limit_unless_one_request_is_larger(worker: Worker) -> None:
    worker.start_first()
    for name, size in (("two", 2), ("three", 3), ("one", 1), ("nine", 9), ("last", 1)):
        worker.start_and_wait(name, size=size, limit=5)
    worker.go.set()
    wait_until(lambda: len(worker.batches) == 5)
    assert worker.batches == [["first"], ["two", "three"], ["one"], ["nine"], ["last"]]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_thread_does_not_end_those_it_works_for(worker: Worker, error: type[BaseException]) -> None:
    def interrupted(requests: Sequence[Any]) -> Sequence[Any]:
        if threading.current_thread() is leading[0]:
            raise error
        return worker.run(requests)

    leading: list[threading.Thread] = []
    caught: list[BaseException] = []

    def lead() -> None:
        leading.append(threading.current_thread())
        try:
            worker.queue.submit(interrupted, "leader", group="b", size=1, limit=32)
        except BaseException as ended:
            caught.append(ended)

    worker.start_first()
    thread = threading.Thread(target=lead)
    thread.start()
    wait_until(lambda: len(worker.queue._waiting) == 1)
    others = [worker.start_and_wait(number, group="b", run=interrupted) for number in range(3)]
    worker.go.set()
    assert [other.result() for other in others] == ["done 0", "done 1", "done 2"]
    thread.join()
    assert [type(ended) for ended in caught] == [error]
    assert worker.batches == [["first"], [0, 1, 2]]


def interrupt_main_thread(condition: Callable[[], bool]) -> threading.Thread:
    """Starts a thread that interrupts the main one, as Ctrl-C does, once the condition holds."""
    main = threading.main_thread().ident
    assert main == threading.get_ident(), "a signal interrupts the main thread only"

    def interrupt() -> None:
        wait_until(condition)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def test_a_thread_that_is_interrupted_while_it_waits_leaves_the_queue(worker: Worker) -> None:
    first = worker.start_first()
    thread = interrupt_main_thread(lambda: len(worker.queue._waiting) == 1)
    with pytest.raises(KeyboardInterrupt):
        worker.queue.submit(worker.run, "given up", group="a", size=1, limit=32)
    thread.join()
    after = worker.start_and_wait("after")
    worker.go.set()
    assert (first.result(), after.result()) == ("done first", "done after")
    assert worker.batches == [["first"], ["after"]]


def test_a_request_is_not_run_again_for_a_thread_that_has_left(worker: Worker) -> None:
    """The main thread is interrupted while another one runs its request, and then that one ends, too."""
    running, end = threading.Event(), threading.Event()

    def run(requests: Sequence[Any]) -> Sequence[Any]:
        if "leader" not in requests:
            return worker.run(requests)
        worker.batches.append(list(requests))
        running.set()
        assert end.wait(20)
        raise SystemExit

    def begin() -> bool:
        wait_until(lambda: len(worker.queue._waiting) == 2)
        worker.go.set()
        return running.wait(20)

    worker.start_first()
    leader = worker.start_and_wait("leader", run=run)
    thread = interrupt_main_thread(begin)
    with pytest.raises(KeyboardInterrupt):
        worker.queue.submit(run, "given up", group="a", size=1, limit=32)
    thread.join()
    other = worker.start_and_wait("other", run=run)
    end.set()
    with pytest.raises(SystemExit):
        leader.result()
    assert other.result() == "done other"
    assert worker.batches == [["first"], ["leader", "given up"], ["other"]]


def test_a_turn_is_shared_with_nobody(worker: Worker) -> None:
    worker.go.set()
    with worker.queue.turn():
        waiting = [worker.start_and_wait(number) for number in range(3)]
        assert worker.batches == []
    assert [future.result() for future in waiting] == ["done 0", "done 1", "done 2"]
    with pytest.raises(KeyError), worker.queue.turn():
        raise KeyError
    assert worker.start("after").result() == "done after"


def test_whoever_has_a_turn_gets_another_at_once(worker: Worker) -> None:
    def nested(requests: Sequence[int]) -> Sequence[int]:
        with worker.queue.turn():
            return [
                worker.queue.submit(nested, request - 1, group="b", size=1, limit=1) + 1 if request else 0
                for request in requests
            ]

    assert worker.queue.submit(nested, 3, group="a", size=1, limit=32) == 3


def test_owners_share_the_time_and_not_the_turns() -> None:
    """Turns of one owner are ten times as long as those of another; both have three threads that always wait."""
    queue, turns, end = BatchingQueue(), list[str](), threading.Event()

    def take(owner: str, seconds: float) -> None:
        OWNER.set(owner)
        while not end.is_set():
            with queue.turn():
                turns.append(owner)
                time.sleep(seconds)

    with ThreadPoolExecutor(6) as pool:
        for _ in range(3):
            pool.submit(take, "greedy", 0.03)
            pool.submit(take, "modest", 0.003)
        wait_until(lambda: len(turns) > 100)
        end.set()
    assert 4 * turns.count("greedy") < turns.count("modest")


def test_a_long_turn_gives_way_to_an_owner_that_has_used_less() -> None:
    queue, steps, end = BatchingQueue(), list[str](), threading.Event()

    def long() -> None:
        OWNER.set("greedy")
        with queue.turn():
            while not end.is_set():
                steps.append("greedy")
                time.sleep(0.003)
                queue.give_way()
                assert queue.is_mine

    def short() -> None:
        OWNER.set("modest")
        with queue.turn():
            steps.append("modest")
            assert not queue.give_way()  # the greedy one has used more

    with ThreadPoolExecutor(2) as pool:
        greedy = pool.submit(long)
        for number in range(1, 6):
            wait_until(lambda: bool(steps) and steps[-1] == "greedy")
            pool.submit(short).result(20)
            assert steps.count("modest") == number
        end.set()
        greedy.result(20)
    assert queue._holder is None
    assert not queue._waiting


def test_a_turn_gives_way_to_nobody_of_its_own_owner(worker: Worker) -> None:
    def run(requests: Sequence[Any]) -> Sequence[Any]:
        worker.run(requests)
        time.sleep(0.05)
        return [worker.queue.give_way() for _ in requests]

    first = worker.start_first(run=run)
    other = worker.start_and_wait("other", group="b", run=run)
    worker.go.set()
    assert (first.result(), other.result()) == (False, False)
    assert worker.batches == [["first"], ["other"]]


def test_a_thread_that_is_interrupted_while_it_gives_way_leaves_the_queue() -> None:
    queue, begun, end = BatchingQueue(), threading.Event(), threading.Event()

    def other() -> None:
        OWNER.set("other")
        with queue.turn():
            begun.set()
            assert end.wait(20)

    with ThreadPoolExecutor(1) as pool:
        with queue.turn():
            waiting = pool.submit(other)
            wait_until(lambda: queue.is_owed)
            thread = interrupt_main_thread(begun.is_set)
            with pytest.raises(KeyboardInterrupt):
                queue.give_way()
        thread.join()
        end.set()
        waiting.result(20)
    assert queue._holder is None
    assert not queue._waiting


def test_who_was_away_has_saved_nothing_up() -> None:
    queue = BatchingQueue()
    for _ in range(3):
        with queue.turn():
            time.sleep(0.02)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_turns_of, "late", queue).result()
    assert queue._used["late"] >= 0.04


def test_one_owner_s_part_of_a_batch_is_small_while_others_come(worker: Worker) -> None:
    """They would wait for all of it."""

    def start(owner: str, request: str) -> None:
        count = len(worker.queue._waiting)

        def run() -> None:
            OWNER.set(owner)
            worker.queue.submit(worker.run, request, group="a", size=1, limit=32)

        worker.pool.submit(run)
        wait_until(lambda: len(worker.queue._waiting) == count + 1)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(_turns_of, "modest", worker.queue).result()
    worker.start_first()
    for number in range(6):
        start("greedy", f"greedy {number}")
    start("modest", "modest")
    worker.go.set()
    wait_until(lambda: len(worker.batches) == 3)
    assert sorted(map(len, worker.batches[1:])) == [2, 5]
    assert ["modest" in batch for batch in worker.batches].count(True) == 1


def _turns_of(owner: str, queue: BatchingQueue) -> None:
    OWNER.set(owner)
    with queue.turn():
        pass


@pytest.mark.parametrize("outcome", ["early", KeyError("early")])
def test_a_finished_request_does_not_wait_for_its_batch(worker: Worker, outcome: Any) -> None:
    finished = threading.Event()

    def run(requests: Batch[Any]) -> Sequence[Any]:
        requests.finish(list(requests).index("short"), outcome)
        assert finished.wait(20)
        return [f"late {request}" for request in requests]

    worker.start_first()
    long = worker.start_and_wait("long", group="b", run=run)
    short = worker.start_and_wait("short", group="b", run=run)
    worker.go.set()
    if isinstance(outcome, Exception):
        with pytest.raises(KeyError):
            short.result(20)
    else:
        assert short.result(20) == outcome
    assert not long.done()
    finished.set()
    assert long.result(20) == "late long"


def test_whoever_is_finished_pays_for_no_more_of_the_batch() -> None:
    queue, begun, joined = BatchingQueue(), threading.Event(), threading.Event()

    def run(requests: Batch[str]) -> Sequence[str]:
        assert sorted(requests) == ["long", "short"]
        requests.finish(list(requests).index("short"), "")
        time.sleep(0.1)
        return list(requests)

    def ask(owner: str) -> str:
        OWNER.set(owner)
        return queue.submit(run, owner, group="a", size=1, limit=2)

    def hold() -> None:
        with queue.turn():
            begun.set()
            assert joined.wait(20)

    with ThreadPoolExecutor(3) as pool:
        pool.submit(hold)
        assert begun.wait(20)
        asked = [pool.submit(ask, owner) for owner in ("long", "short")]
        wait_until(lambda: len(queue._waiting) == 2)
        joined.set()
        assert [one.result(20) for one in asked] == ["long", ""]
    assert queue._used["long"] - queue._used["short"] >= 0.09


def test_isolated_errors_hit_only_their_request() -> None:
    def invert(numbers: Sequence[int]) -> list[float]:
        return [1 / number for number in numbers]

    assert isolating_errors(invert, [1, 2]) == [1.0, 0.5]
    one, error, half = isolating_errors(invert, [1, 0, 2])
    assert (one, half) == (1.0, 0.5)
    assert isinstance(error, ZeroDivisionError)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.sampled_from(["", "one", "all"])), max_size=6),
        min_size=2,
        max_size=8,
    )
)
def test_every_caller_of_a_crowd_gets_its_own_result(plans: list[list[tuple[str, int, str]]]) -> None:
    """Each plan is the requests of one thread: a group, a size, and what fails with it: nothing, it, or its batch."""
    queue, limit, busy = BatchingQueue(), 4, threading.Lock()

    def run(requests: Sequence[tuple[int, int, str, int, str]]) -> Sequence[Any]:
        assert busy.acquire(blocking=False), "two batches at a time"
        try:
            assert len({group for _, _, group, _, _ in requests}) == 1
            assert len(requests) == 1 or sum(size for _, _, _, size, _ in requests) <= limit
            if any(failure == "all" for *_, failure in requests):
                raise MemoryError
            return [KeyError(request) if request[-1] == "one" else request for request in requests]
        finally:
            busy.release()

    def ask(thread: int) -> list[object]:
        outcomes: list[object] = []
        for number, (group, size, failure) in enumerate(plans[thread]):
            request = (thread, number, group, size, failure)
            try:
                outcomes.append(queue.submit(run, request, group=group, size=size, limit=limit) == request)
            except (KeyError, MemoryError) as error:
                outcomes.append(type(error) if isinstance(error, MemoryError) else error.args == (request,))
        return outcomes

    with ThreadPoolExecutor(len(plans)) as pool:
        for plan, outcomes in zip(plans, pool.map(ask, range(len(plans))), strict=True):
            for (_, _, failure), outcome in zip(plan, outcomes, strict=True):
                assert outcome is MemoryError if failure == "all" else outcome in (True, MemoryError)
    assert queue._holder is None
    assert not queue._waiting


def test_with_patience_a_crowd_coming_one_by_one_is_one_batch(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests arrive while the queue is patient. Its clock is replaced, so a slow machine changes nothing."""
    waits: list[float] = []
    arriving = iter(["late 1", "late 2"])
    crowd: list[Future[Any]] = []

    def sleep(seconds: float) -> None:
        if seconds:
            waits.append(seconds)
            crowd.extend(worker.start_and_wait(request) for request in itertools.islice(arriving, 1))

    monkeypatch.setattr("mac_rag.batching_queue.time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    worker.queue.patience = 60.0
    first = worker.start_first()
    early = [worker.start_and_wait(f"early {number}") for number in range(2)]
    worker.go.set()
    assert [one.result(20) for one in (first, *early)] == ["done first", "done early 0", "done early 1"]
    assert waits == []  # the batches before were of one request
    assert worker.start("late 0").result(20) == "done late 0"
    assert [one.result(20) for one in crowd] == ["done late 1", "done late 2"]
    assert worker.batches == [["first"], ["early 0", "early 1"], ["late 0", "late 1", "late 2"]]
    assert waits == [60.0] * 3  # the last of them brought nobody
    for request in ("alone", "alone again"):
        worker.start(request).result(20)
    assert waits == [60.0] * 4  # the first of both waits, because a crowd came before it


class TestCancelled:
    def test_a_request_that_nobody_waits_for_is_not_run(self, worker: Worker) -> None:
        gone = threading.Event()
        first = worker.start_first()
        unwanted = worker.pool.submit(
            lambda: worker.queue.submit(worker.run, "unwanted", group="a", size=1, limit=32, cancelled=gone.is_set)
        )
        wait_until(lambda: len(worker.queue._waiting) == 1)
        wanted = worker.start_and_wait("wanted")
        gone.set()
        worker.go.set()
        with pytest.raises(CancelledError):
            unwanted.result(20)
        assert first.result(20) == "done first"
        assert wanted.result(20) == "done wanted"
        assert worker.batches == [["first"], ["wanted"]]
        assert not worker.queue._waiting

    def test_one_that_runs_already_is_finished(self, worker: Worker) -> None:
        gone = threading.Event()
        running = worker.pool.submit(
            lambda: worker.queue.submit(worker.run, "running", group="a", size=1, limit=32, cancelled=gone.is_set)
        )
        assert worker.begun.wait(20)
        gone.set()
        worker.go.set()
        assert running.result(20) == "done running"


def test_nobody_is_patient_while_somebody_waits_who_cannot_join(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("mac_rag.batching_queue.time", SimpleNamespace(sleep=waits.append, monotonic=time.monotonic))

    def run(requests: Sequence[Any]) -> Sequence[Any]:
        worker.run(requests)
        return [waits.count(60.0)] * len(requests)

    worker.queue.patience = 60.0
    worker.start_first()
    crowd = [worker.start_and_wait(number, run=run) for number in range(2)]
    other = worker.start_and_wait("other", group="b", run=run)
    worker.queue._last_batch = 2
    worker.go.set()
    assert [one.result(20) for one in (*crowd, other)] == [0, 0, 1]


class Stepper:
    """Runs requests `(name, steps)` in steps, each until it has had so many; others join between two.

    Attributes:
        steps: the names that had each step.
        threads: the threads that went on with it.
        closed: batches that are over.
    """

    def __init__(self) -> None:
        self.queue, self.pool = BatchingQueue(), ThreadPoolExecutor(32)
        self.steps: list[list[str]] = []
        self.threads: list[int] = []
        self.begun: list[list[str]] = []
        self.closed = 0
        self._go = threading.Semaphore(0)

    def run(self, requests: Batch[tuple[str, int]]) -> Generator[None, None, None]:
        left = [(requests, place) for place in range(len(requests))]
        had: dict[str, int] = {}
        self.begun.append([name for name, _ in requests])
        try:
            while left:
                assert self._go.acquire(timeout=20)
                self.threads.append(threading.get_ident())
                self.steps.append([batch[place][0] for batch, place in left])
                going = []
                for batch, place in left:
                    name, steps = batch[place]
                    had[name] = had.get(name, 0) + 1
                    if name.startswith("bad"):
                        batch.finish(place, KeyError(name))
                    elif name.startswith("fatal"):
                        raise MemoryError
                    elif had[name] == steps:
                        batch.finish(place, f"done {name}")
                    else:
                        going.append((batch, place))
                left = going
                for joined in requests.joining():
                    self.begun.append([name for name, _ in joined])
                    left += [(joined, place) for place in range(len(joined))]
                yield
        finally:
            self.closed += 1

    def go_on(self, steps: int) -> None:
        """Lets some steps happen, and waits until they have."""
        count = len(self.steps) + steps
        for _ in range(steps):
            self._go.release()
        wait_until(lambda: len(self.steps) >= count)

    def ask(self, name: str, steps: int, group: str = "a", owner: str = "", **options: Any) -> str:
        OWNER.set(owner)
        options = {"size": 1, "limit": 32, "joins": "steps", **options}
        return self.queue.submit(self.run, (name, steps), group=group, **options)

    def start(self, name: str, steps: int, **options: Any) -> Future[str]:
        """Asks from a thread of its own; returns once the request waits, or runs if it is the first one."""
        queue = self.queue
        count, is_first = len(queue._waiting), queue._holder is None
        future = self.pool.submit(self.ask, name, steps, **options)
        wait_until(lambda: bool(self.begun) if is_first else len(queue._waiting) == count + 1)
        return future


@pytest.fixture
def stepper() -> Iterator[Stepper]:
    stepper = Stepper()
    yield stepper
    for _ in range(1000):
        stepper._go.release()
    stepper.pool.shutdown()
    assert stepper.queue._holder is None
    assert not stepper.queue._waiting


class TestJoining:
    def test_a_request_joins_between_two_steps_and_does_not_wait_for_the_others(self, stepper: Stepper) -> None:
        long = stepper.start("long", 5)
        stepper.go_on(1)
        late = [stepper.start("late", 1, group="b"), stepper.start("later", 2, group="b")]
        stepper.go_on(2)
        assert late[0].result(20) == "done late"
        stepper.go_on(1)
        assert late[1].result(20) == "done later"
        assert not long.done()
        stepper.go_on(1)
        assert long.result(20) == "done long"
        assert stepper.begun == [["long"], ["late", "later"]]
        assert stepper.steps == [["long"], ["long"], ["long", "late", "later"], ["long", "later"], ["long"]]

    def test_only_what_may_join_does(self, stepper: Stepper) -> None:
        long = stepper.start("long", 4)
        other = stepper.start("other", 1, joins=None)
        stepper.go_on(3)
        assert stepper.begun == [["long"]]
        stepper.go_on(2)
        assert (long.result(20), other.result(20)) == ("done long", "done other")

    def test_nobody_is_overtaken_by_one_after_another_who_joins(self, stepper: Stepper) -> None:
        taken: list[str] = []

        def turn() -> None:
            with stepper.queue.turn():
                taken.extend(str(begun) for begun in stepper.begun)

        long = stepper.start("long", 3)
        joining = stepper.start("joins", 2)
        stepper.go_on(1)
        waiting = stepper.pool.submit(turn)
        wait_until(lambda: len(stepper.queue._waiting) == 1)
        after = stepper.start("after", 1)
        stepper.go_on(3)
        assert [one.result(20) for one in (long, joining)] == ["done long", "done joins"]
        waiting.result(20)
        stepper.go_on(1) if not after.done() else None
        assert after.result(20) == "done after"
        assert taken == ["['long']", "['joins']"]

    def test_of_those_who_join_the_owner_that_has_used_less_comes_first(self, stepper: Stepper) -> None:
        stepper.start("greedy", 3, owner="greedy")
        for number in range(2):
            stepper.start(f"greedy {number}", 1, owner="greedy", group=str(number))
        modest = stepper.start("modest", 1, owner="modest")
        stepper.go_on(2)
        assert modest.result(20) == "done modest"
        assert stepper.steps[1] == ["greedy", "modest", "greedy 0", "greedy 1"]

    def test_short_turns_that_wait_keep_nobody_from_joining(self, stepper: Stepper) -> None:
        def turn() -> list[list[str]]:
            with stepper.queue.turn(soon=True):
                return list(stepper.steps)

        stepper.start("long", 4)
        short = stepper.pool.submit(turn)
        wait_until(lambda: len(stepper.queue._waiting) == 1)
        late = stepper.start("late", 1)
        stepper.go_on(1)
        assert short.result(20) == [["long"]]
        stepper.go_on(1)
        assert late.result(20) == "done late"
        assert stepper.steps == [["long"], ["long", "late"]]

    def test_a_thread_whose_request_is_done_leaves_the_rest_to_another(self, stepper: Stepper) -> None:
        first = stepper.start("first", 2)
        stepper.start("second", 3)
        third = stepper.start("third", 5)
        stepper.go_on(2)
        assert first.result(20) == "done first"
        stepper.go_on(4)
        assert third.result(20) == "done third"
        assert len(set(stepper.threads[:2])) == 1
        assert len(set(stepper.threads)) == 3
        assert stepper.closed == 1
        assert stepper.steps[2:] == [["second", "third"]] * 2 + [["third"]] * 2

    @pytest.mark.parametrize("others", [0, 2])
    def test_an_heir_that_is_interrupted_leaves_the_rest_to_the_next(self, stepper: Stepper, others: int) -> None:
        """It is interrupted after the turn has become its own, and before it goes on; without a next one all ends."""
        go_on = stepper.queue._go_on

        def interrupted(leader: Any, running: Any) -> None:
            if leader.request[0] == "heir":
                raise KeyboardInterrupt
            go_on(leader, running)

        stepper.queue._go_on = interrupted  # type: ignore[method-assign]
        first = stepper.start("first", 2)
        heir = stepper.start("heir", 4)
        nexts = [stepper.start(f"next {number}", 3) for number in range(others)]
        stepper.go_on(2)
        assert first.result(20) == "done first"
        with pytest.raises(KeyboardInterrupt):
            heir.result(20)
        if others:
            stepper.go_on(2)
        assert [one.result(20) for one in nexts] == [f"done next {number}" for number in range(others)]
        wait_until(lambda: stepper.queue._holder is None)
        assert stepper.closed == 1
        again = stepper.start("again", 1)
        stepper.go_on(1)
        assert again.result(20) == "done again"

    def test_what_joined_is_run_again_if_the_thread_that_runs_it_ends(self, stepper: Stepper) -> None:
        calls = itertools.count()

        def give_way() -> bool:
            if next(calls) == 2:
                raise KeyboardInterrupt
            return False

        stepper.queue.give_way = give_way  # type: ignore[method-assign]
        first = stepper.start("first", 9)
        late = [stepper.start(f"late {number}", 3, group=str(number)) for number in range(2)]
        stepper.go_on(3)
        with pytest.raises(KeyboardInterrupt):
            first.result(20)
        assert stepper.closed == 1
        stepper.go_on(4)
        assert [one.result(20) for one in late] == ["done late 0", "done late 1"]
        assert stepper.begun == [["first"], ["late 0"], ["late 1"], ["late 0"], ["late 1"]]

    def test_an_error_is_that_of_one_or_of_all(self, stepper: Stepper) -> None:
        long = stepper.start("long", 6)
        bad = stepper.start("bad", 3)
        stepper.go_on(2)
        with pytest.raises(KeyError):
            bad.result(20)
        assert not long.done()
        fatal = stepper.start("fatal", 3)
        stepper.go_on(2)
        for one in (long, fatal):
            with pytest.raises(MemoryError):
                one.result(20)
        assert stepper.closed == 1

    def test_no_more_join_than_there_is_room_for(self, stepper: Stepper) -> None:
        stepper.start("long", 9, limit=4)
        others = [stepper.start(name, 2, size=size) for name, size in (("two", 2), ("too many", 2), ("one", 1))]
        stepper.go_on(2)
        assert stepper.steps[-1] == ["long", "two"]
        stepper.go_on(2)
        assert others[0].result(20) == "done two"
        assert stepper.steps[-1] == ["long", "too many", "one"]

    def test_an_owner_s_part_stays_small_while_others_come(self, stepper: Stepper) -> None:
        """Whoever joins pays from then on."""
        with ThreadPoolExecutor(1) as pool:
            pool.submit(_turns_of, "other", stepper.queue).result()
        stepper.start("long", 99, owner="greedy")
        for number in range(6):
            stepper.start(f"greedy {number}", 99, owner="greedy")
        stepper.go_on(2)
        assert len(stepper.steps[-1]) == 4
        modest = stepper.start("modest", 3, owner="modest")
        stepper.go_on(2)
        assert len(stepper.steps[-1]) == 5
        time.sleep(0.1)
        stepper.go_on(2)
        assert modest.result(20) == "done modest"
        used = stepper.queue._used
        assert 0.015 < used["modest"] - used["other"] < 0.5 * (used["greedy"] - used["other"])

    @settings(max_examples=15, deadline=None)
    @given(
        st.lists(
            st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 4), st.booleans()), min_size=1, max_size=4),
            min_size=2,
            max_size=6,
        )
    )
    def test_every_caller_gets_its_own_result(self, plans: list[list[tuple[str, int, bool]]]) -> None:
        """Each plan is the requests of one thread: a group, a number of steps, and whether it may join."""
        stepper = Stepper()
        stepper._go.release(10_000)

        def ask(thread: int) -> bool:
            return all(
                stepper.ask(name := f"{thread} {number}", steps, group, joins="steps" if joins else None)
                == f"done {name}"
                for number, (group, steps, joins) in enumerate(plans[thread])
            )

        with ThreadPoolExecutor(len(plans)) as pool:
            assert all(pool.map(ask, range(len(plans))))
        assert stepper.queue._holder is None
        assert not stepper.queue._waiting
        assert stepper.closed <= sum(map(len, plans))
