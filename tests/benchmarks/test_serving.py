"""The load run of a server, and its figures."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from benchmarks.serving import Memory, main, quantile


def test_memory_tells_what_is_held_at_rest() -> None:
    sizes = [100, 500, 210, 400, 220]
    memory = Memory(SimpleNamespace(resident=lambda: sizes[-1]))  # type: ignore[arg-type]
    for size in list(sizes):
        memory._seen.append(size)
        sizes.append(size)
        if size in (210, 220):
            memory.rests()
    assert memory.described() == "100 MiB at the beginning, 500 at most; at rest 210, 220"


def test_quantiles() -> None:
    assert [quantile([4.0, 1.0, 3.0, 2.0], q) for q in (0.0, 0.5, 0.99)] == [1.0, 3.0, 4.0]


@pytest.mark.slow
def test_a_load_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(model="mac-tiny", documents=20, clients=4, seconds=1, mixed=4, seed=0)
    printed = capsys.readouterr().out
    assert len(re.findall(r"^ *(engine|one client|4 clients|mixed|memory): ", printed, re.MULTILINE)) == 5, printed
    assert "error" not in printed
