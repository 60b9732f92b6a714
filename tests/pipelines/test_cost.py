"""What a training costs, told after its first steps: counts, tokens, and bytes by part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.cost import duration, parts_of, size
from pipelines.tasks.train import TrainTask
from pipelines.tasks.tune_qa import TuneConfig, TuneTask
from pipelines.trainer import Trainer
from tests.pipelines.helpers import TRAINER
from tests.pipelines.test_pipelines import train_recipe
from tests.pipelines.toy_training import train

Folder = Callable[[str], Path]


def cost(run: Path) -> dict[str, Any]:
    """The one record of a run."""
    [record] = [json.loads(line) for line in (run / "metrics.jsonl").open() if '"kind": "cost"' in line]
    return record  # type: ignore[no-any-return]


def test_a_training_tells_its_cost_once_after_its_third_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, accumulate=2)
    record = cost(tmp_path)
    assert record["step"] == 3
    assert (record["steps"], record["examples_per_step"], record["examples"]) == (24, 16, 24 * 16)
    assert record["seconds"] == pytest.approx(24 * record["seconds_per_step"])
    weights = 4 * (6 * 16 + 16 + 16 + 1)
    assert record["layers/weights_bytes"] == record["layers/gradients_bytes"] == weights
    assert record["layers/optimizer_bytes"] == 2 * weights + 4 * 4  # two moments, and a step for each of four tensors
    assert record["frozen/weights_bytes"] == 24
    assert record["frozen/gradients_bytes"] == record["frozen/optimizer_bytes"] == 0
    assert record["resident_peak_bytes"] > 50e6
    assert "tokens" not in record  # the toy reads none
    shown = capsys.readouterr().err
    assert shown.count("cost: 24 steps, 384 examples (16 a step)") == 1
    assert "layers: weights 516 B, gradients 516 B, optimiser 1.02 KiB" in shown
    assert " left" in shown  # the bar's note


@pytest.mark.parametrize("steps", [1, 2])
def test_a_shorter_training_tells_it_at_its_end(tmp_path: Path, steps: int) -> None:
    train(tmp_path, steps=steps, save_every=steps)
    assert cost(tmp_path)["step"] == steps


def test_a_resumed_training_tells_it_for_all_steps(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, stop=("batch", 8))
    with (tmp_path / "metrics.jsonl").open("r+") as log:
        kept = [line for line in log if '"kind": "cost"' not in line]
        log.seek(0)
        log.truncate()
        log.writelines(kept)
    train(tmp_path)
    assert cost(tmp_path)["step"] == 11
    assert cost(tmp_path)["steps"] == 24


def test_tokens_are_those_that_the_lm_reads_padding_included(model_folder: Folder, tmp_path: Path) -> None:
    recipe = TuneConfig.parse(
        {
            "base_lm": {"name": str(model_folder("llama"))},
            "data": {"name": "newswire", "documents": 20, "validation_documents": 2},
            "trainer": {**TRAINER, "steps": 3, "accumulate": 2},
        },
        "test",
    )
    task = TuneTask(recipe)
    Trainer(task, recipe.trainer, tmp_path).run()
    batches = [task.batch(step, micro, 3) for step in range(3) for micro in range(2)]
    read = sum(len(batch) * max(len(sequence.ids) for sequence in batch) for batch in batches)
    assert cost(tmp_path)["tokens"] == pytest.approx(read)
    assert cost(tmp_path)["tokens_per_step"] == pytest.approx(read / 3)


def test_a_macs_networks_are_parts_and_its_frozen_lm_has_weights_alone(model_folder: Folder, tmp_path: Path) -> None:
    recipe = train_recipe(model_folder, negatives=0, distractors=0)
    task = TrainTask(recipe)
    Trainer(task, recipe.trainer, tmp_path).run()
    record = cost(tmp_path)
    parts = {name.partition("/")[0] for name in record if "/" in name}
    assert parts == {"base_lm", "amortization", "input_encoder", "aggregation", "modulation"}
    assert record["base_lm/weights_bytes"] > 0
    assert record["base_lm/gradients_bytes"] == record["base_lm/optimizer_bytes"] == 0
    for part in parts - {"base_lm"}:
        assert 0 < record[f"{part}/gradients_bytes"] <= record[f"{part}/weights_bytes"]
        assert record[f"{part}/optimizer_bytes"] > 1.9 * record[f"{part}/gradients_bytes"]
    total = sum(p.numel() * p.element_size() for p in set(task.parameters()))
    assert sum(record[f"{part}/weights_bytes"] for part in parts) == total


def test_every_parameter_is_in_one_part() -> None:
    shared = torch.nn.Linear(2, 2)
    task = torch.nn.Module()
    task.first, task.second, task.own = shared, torch.nn.Sequential(shared, torch.nn.Linear(2, 3)), shared.weight
    task.alone = torch.nn.Parameter(torch.zeros(5))
    parts = parts_of(task)
    assert {name: sum(p.numel() for p in part) for name, part in parts.items()} == {"first": 6, "second": 9, "other": 5}


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (size(999), "999 B"),
        (size(1000), "0.977 KiB"),
        (size(2**20), "1 MiB"),
        (duration(59.4), "59 s"),
        (duration(3600), "1 h 0 min"),
    ],
)
def test_amounts_are_short(shown: str, text: str) -> None:
    assert shown == text
