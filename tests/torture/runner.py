"""Runs the trials of a part one by one in a process of their own, which may hang or die."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.bank.helpers import fast_folder
from tests.torture.part import Part, failure_of, make
from tests.torture.progress import FOLDER, Progress, commit

HOUR = 3600.0  # the longest that one run works on one part
_SAVED = 5.0  # seconds between two savings of the progress
_MESSAGE = 6000  # characters of a message that are kept

_PROCESSES = multiprocessing.get_context("fork")


def run(name: str, runs: int | None, folder: Path = FOLDER, *, fresh: bool = False, seconds: float = HOUR) -> Progress:
    """Goes on with a part: until its goal, or until the time is over.

    Args:
        name: name of the part.
        runs: the number of trials; None for the part's goal.
        folder: folder of the progress.
        fresh: starts with the first trial.
        seconds: the time.
    """
    with fast_folder() as place:
        part = make(name, place)
        goal = part.goal if runs is None else min(runs, part.goal)
        progress = (None if fresh else Progress.load(name, folder)) or Progress(name, [], goal)
        progress.goal = goal
        if commit() not in progress.commits:
            _retry(part, progress, folder / f"{name}.hang.txt")
            if progress.next < goal and commit() not in progress.commits:
                progress.commits.append(commit())
        until, saved = time.monotonic() + seconds, 0.0
        while progress.next < goal and time.monotonic() < until:
            with _worker(part, progress.next, goal, folder / f"{name}.hang.txt") as worker:
                while progress.next < goal and time.monotonic() < until and _next(worker, part, progress):
                    if time.monotonic() > saved + _SAVED:
                        saved = time.monotonic()
                        progress.save(folder)
                        _show(progress)
        progress.save(folder)
        _show(progress, end="\n")
    return progress


class _Worker:
    """The process that runs trials; it says the time and the failure of each, and has said all when it ends."""

    def __init__(self, part: Part, first: int, stop: int, trace: Path) -> None:
        self.trace = trace
        trace.parent.mkdir(parents=True, exist_ok=True)
        self.heard, said = _PROCESSES.Pipe(duplex=False)
        self.process = _PROCESSES.Process(target=_work, args=(part, first, stop, trace, said))
        self.process.start()
        said.close()

    def kill(self) -> None:
        """Kills it and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.heard.close()


@contextmanager
def _worker(part: Part, first: int, stop: int, trace: Path) -> Iterator[_Worker]:
    worker = _Worker(part, first, stop, trace)
    try:
        yield worker
    finally:
        worker.kill()
        trace.unlink(missing_ok=True)


def _retry(part: Part, progress: Progress, trace: Path) -> None:
    """Makes trials that have failed again, after a change of the library; those that succeed are failures no more."""
    failures, progress.failures = progress.failures, []
    counted = asdict(progress)
    for failure in failures:
        progress.next = failure["seed"]
        with _worker(part, progress.next, progress.next + 1, trace) as worker:
            _next(worker, part, progress)
    progress.next, progress.tried = counted["next"], counted["tried"]
    if failures:
        progress.commits.append(commit())


def _next(worker: _Worker, part: Part, progress: Progress) -> bool:
    """Counts the next trial; False if the process cannot go on."""
    seed = progress.next
    kind, begin = part.kind(seed), time.perf_counter()
    taken, failure, message, goes_on = 0.0, None, "", True
    if not worker.heard.poll(part.limit + 2):
        failure, message, goes_on = "hang", worker.trace.read_text(), False
    else:
        try:
            taken, failure, message = worker.heard.recv()
        except EOFError:
            worker.process.join(10)
            failure, message, goes_on = "foreign", f"the process died with exit code {worker.process.exitcode}", False
    progress.next += 1
    progress.tried[kind] = progress.tried.get(kind, 0) + 1
    progress.seconds += time.perf_counter() - begin
    progress.slowest = max(progress.slowest, (taken, seed))
    if failure is not None:
        progress.failed(seed, kind, failure, message[-_MESSAGE:])
        print(f"\n{progress.part}, seed {seed} ({kind}): {failure}: {message[-500:]}", flush=True)
    return goes_on


def _work(part: Part, first: int, stop: int, trace: Path, said: Connection) -> None:
    os.setpgid(0, 0)
    # What trials print is of no interest, and much.
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    with trace.open("w") as file, fast_folder() as temporary:
        tempfile.tempdir = str(temporary)
        for seed in range(first, stop):
            faulthandler.dump_traceback_later(part.limit, file=file)
            said.send(timed(part, seed))
            faulthandler.cancel_dump_traceback_later()


def timed(part: Part, seed: int) -> tuple[float, str | None, str]:
    """Makes one trial; returns its seconds, the kind of its failure or None, and a message."""
    start, failure, message = time.perf_counter(), None, ""
    try:
        part.trial(seed)
    except BaseException as error:
        failure, message = failure_of(error), traceback.format_exc()
    return time.perf_counter() - start, failure, message


def _show(progress: Progress, **options: Any) -> None:
    rate = progress.next / progress.seconds if progress.seconds else 0.0
    line = f"{progress.part}: {progress.next:,} of {progress.goal:,} tried, {len(progress.failures):,} failed"
    print(f"\r{line}, {rate:,.1f} a second ", **{"end": "", "flush": True, **options})
