"""Damaged files of every kind, at fixed seeds: each is read as it was meant, or refused with an error of ours."""

from __future__ import annotations

import importlib
import random
from pathlib import Path

import pytest

from tests.memory.helpers import fast_folder
from tests.torture.helpers import copy, little_memory


@pytest.mark.parametrize(("kind", "runs"), [("banks", 40), ("retrievers", 60), ("checkpoints", 12), ("data_files", 25)])
def test_a_damaged_file_is_refused_or_read_as_it_was_meant(kind: str, runs: int, tmp_path: Path) -> None:
    module = importlib.import_module(f"tests.torture.{kind}")
    examples = module.make(tmp_path)
    with fast_folder() as place:
        for seed in range(runs):
            folder = copy(examples[seed % len(examples)], place / "copy")
            how = module.mutate(folder, random.Random(seed))
            try:
                with little_memory():
                    module.check(folder)
            except BaseException as error:
                error.add_note(f"{kind}, seed {seed}: {how}")
                raise
