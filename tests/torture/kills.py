"""Processes that are killed while they change a bank and its retriever: at a random moment, or before a random step.

Each is forked from one that has loaded everything, so that it starts within milliseconds.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.torture.changes import CHANGES, Interrupted, small_model
from tests.torture.mutations import copy
from tests.torture.part import Part
from tests.torture.system import KILL, System

_DONE, _FAILED = 0, 1


class Torture(Part):
    """Kills of every change, in turn."""

    goal = 1_000

    def __init__(self, place: Path) -> None:
        model = small_model(place)
        self._folder = place / "folder"
        self._changes = [Interrupted(name, place / str(number), model) for number, name in enumerate(CHANGES)]
        self._seconds: dict[str, float] = {}  # of each change, if it is not killed
        self._steps: dict[str, int] = {}
        for change in self._changes:
            self._measure(change)

    def _measure(self, change: Interrupted) -> None:
        folder, counted = copy(change.example, self._folder), self._folder.with_name("steps")
        start = time.perf_counter()
        assert _wait(_forked(change, folder, counted=counted)) == _DONE
        self._seconds[change.name] = time.perf_counter() - start
        self._steps[change.name] = int(counted.read_text())

    def kind(self, seed: int) -> str:
        return self._changes[seed % len(self._changes)].name

    def trial(self, seed: int) -> None:
        choice = random.Random(seed)
        change = self._changes[seed % len(self._changes)]
        folder = copy(change.example, self._folder)
        if choice.random() < 0.5:
            victim = _forked(change, folder, choice.randint(1, self._steps[change.name]))
        else:
            victim = _forked(change, folder)
            time.sleep(choice.uniform(0, 1.2 * self._seconds[change.name]))
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        ended = _wait(victim)
        assert ended in (_DONE, -signal.SIGKILL), f"{change.name} ended with {ended}"
        change.check(folder, done=ended == _DONE)


def _forked(change: Interrupted, folder: Path, last: int | None = None, counted: Path | None = None) -> int:
    """Makes a change in a process of its own; returns its number.

    Args:
        change: the change.
        folder: its folder.
        last: the step on the disk before which the process dies; None for none.
        counted: a file for the number of steps; None for none.
    """
    process = os.fork()
    if process:
        return process
    try:
        system = System(folder)
        if last is not None:
            system.fault(KILL, last)
        change.run(folder)
        if counted is not None:
            counted.write_text(str(system.calls))
        os._exit(_DONE)
    finally:
        os._exit(_FAILED)


def _wait(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
