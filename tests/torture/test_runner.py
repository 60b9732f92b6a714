"""The torture itself: it counts every kind of failure, goes on behind it, and goes on where it has stopped."""

from __future__ import annotations

import os
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from mac_rag.errors import BankError
from tests.helpers import run_in_process
from tests.torture import runner
from tests.torture.part import Lost, Part, Stale
from tests.torture.progress import Progress

_ERRORS = {1: Lost("d3"), 2: Stale("d4"), 3: KeyError("x"), 4: AssertionError("no"), 5: BankError("refused")}


class _Failing(Part):
    goal = 12
    limit = 0.5

    def __init__(self, place: Path) -> None:
        self._place = place

    def kind(self, seed: int) -> str:
        return "even" if seed % 2 == 0 else "odd"

    def trial(self, seed: int) -> None:
        if seed in _ERRORS:
            raise _ERRORS[seed]
        if seed == 6:
            os._exit(3)
        if seed == 7:
            time.sleep(60)


def _run(folder: Path) -> None:
    with patch.object(runner, "make", lambda name, place: _Failing(place)), patch.object(runner, "commit", lambda: "a"):
        first = runner.run("part", 3, folder)
        assert (first.next, first.goal, first.tried) == (3, 3, {"even": 2, "odd": 1})
        second = runner.run("part", None, folder)
    assert (second.next, second.goal, second.tried) == (12, 12, {"even": 6, "odd": 6})
    failures = {each["seed"]: each["failure"] for each in second.failures}
    assert failures == {1: "lost", 2: "stale", 3: "foreign", 4: "wrong", 5: "wrong", 6: "foreign", 7: "hang"}
    messages = {each["seed"]: each["message"] for each in second.failures}
    assert "exit code 3" in messages[6]
    assert "in trial" in messages[7]  # where it hangs
    assert Progress.load("part", folder) == second
    assert second.commits == ["a"]
    with patch.object(runner, "make", lambda name, place: _Failing(place)), patch.object(runner, "commit", lambda: "b"):
        with patch.dict(_ERRORS, clear=True):
            mended = runner.run("part", None, folder)  # nothing is left to do but to try again what failed
        assert {each["seed"]: each["failure"] for each in mended.failures} == {6: "foreign", 7: "hang"}
        assert (mended.next, mended.tried, mended.commits) == (12, second.tried, ["a", "b"])
        again = runner.run("part", 1, folder, fresh=True)
        assert (again.tried, again.commits) == ({"even": 1}, ["b"])


@pytest.mark.slow
def test_failures_are_counted_by_their_kind_and_do_not_stop_a_run(tmp_path: Path) -> None:
    assert run_in_process(_run, tmp_path) == 0
