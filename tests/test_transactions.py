"""A change that fails leaves bank and retriever as they were, in memory and on disk, and the same call then succeeds.

A sample: `make torture` lets every call of the file system fail in every way (`tests/torture/faults.py`).
"""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.bank.helpers import fast_folder
from tests.torture.faults import Torture
from tests.torture.system import preloading


class OneOfEach(Torture):
    """A call of every change, in each of the ways to fail."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        draw = random.Random(0)
        calls = sorted(self._trials, key=_change_and_way)
        self._trials = [draw.choice(list(same)) for _, same in groupby(calls, _change_and_way)]
        self.goal = len(self._trials)


def _change_and_way(trial: tuple[Any, ...]) -> tuple[str, str]:
    name, _, how, _ = trial
    return name, how


def test_a_change_that_fails_at_a_call() -> None:
    """In a process whose calls of the system can be watched, those of SQLite, too."""
    command = [sys.executable, "-m", "tests.test_transactions"]
    done = subprocess.run(command, env=preloading(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    with fast_folder() as place:
        sample = OneOfEach(place)
        gc.collect()
        gc.freeze()  # trials collect what they leave, which would take half a second each to look through all modules
        for number in range(sample.goal):
            sample.trial(number)
