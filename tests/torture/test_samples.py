"""A few trials of each part of the torture, at fixed seeds."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from tests.bank.helpers import fast_folder
from tests.processes import run_in_process
from tests.torture import soak
from tests.torture.mutations import little_memory
from tests.torture.part import make
from tests.torture.system import preloading

pytestmark = pytest.mark.slow

MUTATIONS = [("banks", 12), ("retrievers", 24), ("checkpoints", 4), ("data_files", 8)]


@pytest.mark.parametrize(("part", "trials"), MUTATIONS)
def test_a_damaged_file_is_refused_or_read_as_it_was_meant(part: str, trials: int) -> None:
    with fast_folder() as place:
        torture = make(part, place)
        kinds = {torture.kind(seed) for seed in range(trials)}
        assert kinds == ({"sealed", "unsealed"} if part in ("banks", "retrievers") else {"unsealed"})
        for seed in range(trials):
            with little_memory():
                torture.trial(seed)


@pytest.mark.parametrize(("part", "seeds"), [("power_loss", range(0, 6400, 400)), ("kills", range(8))])
def test_what_a_loss_of_power_and_a_kill_leave(part: str, seeds: range) -> None:
    """In a process whose calls of the system can be watched."""
    command = [sys.executable, "-m", "tests.torture", part, "--seed", *map(str, seeds)]
    done = subprocess.run(command, env=preloading(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def _soak(report: Path) -> None:
    try:
        with fast_folder() as place:
            torture = soak.Torture(place)
            torture.seconds = 2.0
            torture.trial(0)
    except BaseException:
        report.write_text(traceback.format_exc())


def test_one_writer_and_four_readers(tmp_path: Path) -> None:
    """They are forked from a process without threads."""
    report = tmp_path / "report"
    code = run_in_process(_soak, report)
    assert not report.exists(), report.read_text()
    assert code == 0
