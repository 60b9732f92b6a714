"""The load run of a server, and its figures."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from benchmarks.serving import MIXED, Memory, grown, main, quantile


def test_memory_tells_what_is_held_at_rest() -> None:
    sizes = [100, 500, 210, 400, 220]
    memory = Memory(SimpleNamespace(resident=lambda: sizes[-1]))  # type: ignore[arg-type]
    for size in list(sizes):
        memory._seen.append(size)
        sizes.append(size)
        if size in (210, 220):
            memory.rests()
    assert memory.described() == "100 MiB at the beginning, 500 at most; at rest 210, 220"
    assert memory.faults() == []
    memory._resting.append(232)
    assert memory.faults() == ["memory at rest grew from 220 to 232 MiB"]


def test_files_that_grow_are_named() -> None:
    sizes = [{"banks": 1_000_000, "jobs": 0, "uploads": 0}] * 2
    assert grown([*sizes, {"banks": 1_050_000, "jobs": 40_000, "uploads": 0}], 1.0) == []
    last = {"banks": 1_200_000, "jobs": 90_000, "uploads": 5}
    assert grown([*sizes, last], 1.2) == ["jobs grew from 0 to 90,000 bytes"]
    assert grown([*sizes, last], 1.0) == [
        "banks grew from 1,000,000 to 1,200,000 bytes",
        "jobs grew from 0 to 90,000 bytes",
    ]


def test_quantiles() -> None:
    assert [quantile([4.0, 1.0, 3.0, 2.0], q) for q in (0.0, 0.5, 0.99)] == [1.0, 3.0, 4.0]


@pytest.mark.slow
def test_a_load_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(model="mac-tiny", documents=20, clients=6, seconds=1, mixed=8, seed=0)
    printed = capsys.readouterr().out
    names = "engine|one client|6 clients|mixed|memory|files|documents|killed"
    assert len(re.findall(rf"^ *({names}): ", printed, re.MULTILINE)) == 8, printed
    assert "error" not in printed
    for kind in MIXED:
        assert f"{kind} " in printed
