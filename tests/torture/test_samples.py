"""A few trials of each part of the torture, at fixed seeds."""

from __future__ import annotations

import pytest

from tests.memory.helpers import fast_folder
from tests.torture.mutations import little_memory
from tests.torture.part import make

MUTATIONS = [("banks", 40), ("retrievers", 60), ("checkpoints", 12), ("data_files", 25)]


@pytest.mark.parametrize(("part", "trials"), MUTATIONS)
def test_a_damaged_file_is_refused_or_read_as_it_was_meant(part: str, trials: int) -> None:
    with fast_folder() as place:
        torture = make(part, place)
        kinds = {torture.kind(seed) for seed in range(trials)}
        assert kinds == ({"sealed", "unsealed"} if part in ("banks", "retrievers") else {"unsealed"})
        for seed in range(trials):
            with little_memory():
                torture.trial(seed)
