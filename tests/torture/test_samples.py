"""A few trials of each part of the torture, at fixed seeds."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from mac_rag.bank.storage.lock import HOLDER

from mac_rag.bank import MemoryBank
from tests.bank.helpers import fast_folder
from tests.faults import watching
from tests.helpers import run_in_process
from tests.torture import soak
from tests.torture.mutations import little_memory
from tests.torture.part import make
from tests.torture.power_loss import Recorder

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


def test_moments_of_a_power_loss() -> None:
    with fast_folder() as place:
        torture = make("power_loss", place)
        for seed in range(0, torture.goal, torture.goal // 16):
            torture.trial(seed)


def test_the_writers_note_lasts_before_a_commit_does() -> None:
    """Without the note, the copy of the manifest, which may last before it, would look like the newest manifest."""
    with fast_folder() as place:
        MemoryBank.create(place / "bank", "f00d").close()
        recorder = Recorder(place / "bank")
        with watching(recorder), MemoryBank.open(place / "bank", write=True):
            events = list(recorder.events)
    named = [number for number, event in enumerate(events) if event.names and HOLDER in event.names]
    assert named
    assert any(event.synced == "." for event in events[named[0] :])


def test_tenants() -> None:
    with fast_folder() as place:
        torture = make("tenants", place)
        for seed in range(12):
            torture.trial(seed)


def _try(part: str, seeds: range, report: Path) -> None:
    try:
        with fast_folder() as place:
            torture = make(part, place)
            if isinstance(torture, soak.Torture):
                torture.seconds = 2.0
            for seed in seeds:
                torture.trial(seed)
    except BaseException:
        report.write_text(traceback.format_exc())


@pytest.mark.parametrize(("part", "trials"), [("kills", 8), ("soak", 1)])
def test_processes_of_their_own(part: str, trials: int, tmp_path: Path) -> None:
    """They are forked from a process without threads."""
    report = tmp_path / "report"
    code = run_in_process(_try, part, range(trials), report)
    assert not report.exists(), report.read_text()
    assert code == 0
