"""A change that fails leaves bank and retriever as they were, in memory and on disk, and the same call then succeeds.

A sample: `make torture` lets every call of the file system fail in every way (`tests/torture/faults.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bank.helpers import fast_folder
from tests.torture.faults import EXAMPLES, HOWS, Torture


@pytest.fixture(scope="module")
def torture() -> Iterator[Torture]:
    with fast_folder() as place:
        yield Torture(place)


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_change_that_fails_at_a_call(torture: Torture, example: str) -> None:
    seeds = [seed for seed in range(torture.goal) if torture.kind(seed) == example]
    calls = len(seeds) // len(HOWS)
    assert calls > 25
    # Each way of failing, and other calls for each; less often where a trial opens everything.
    for seed in seeds[:: calls * (13 if example.startswith("process") else 9) // 10]:
        torture.trial(seed)
