"""Training under torch.compile: the networks that a task names are whole graphs, which compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from mac_rag.config import AggregationConfig, ModulationConfig
from mac_rag.model import presets
from pipelines.tasks.train import TrainTask
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_qa import TuneTask
from pipelines.trainer import Task, Trainer
from tests.helpers import Folder
from tests.pipelines.helpers import DATA, TRAINER, metrics, tune_recipe


def train_task(model_folder: Folder, preset: str, **changes: Any) -> TrainTask:
    """Few steps of a preset of the paper, with small networks of its kinds, in 4 bit as in the preset."""
    own = presets.PAPER[preset]
    lm = own.base_lm.model_copy(update={"name": str(model_folder("llama" if preset == "llama2-7b" else "gpt2"))})
    encoder = own.amortization.model_copy(update={"name": str(model_folder("t5"))})
    aggregation = AggregationConfig(blocks=2, heads=2, head_width=8)
    parts = {"base_lm": lm, "amortization": encoder, "input_encoder": encoder, "aggregation": aggregation, **changes}
    model = own.model_copy(update={**parts, "tokens": 4})
    dropout = 0.5 if preset == "llama2-7b" else 0.0  # as its recipe, which amortizes with gradients and without
    values = {"data": DATA, "trainer": {**TRAINER, "batch_size": 4}, "backprop_dropout": dropout, "context_set": 2}
    return TrainTask(TrainConfig.parse({**values, "model": model.model_dump()}, "test"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["distilgpt2", "llama2-7b", "tune_qa"])
def test_networks_of_the_paper_compile_without_a_break(model_folder: Folder, tmp_path: Path, kind: str) -> None:
    def trained(compiled: bool) -> Task:
        task: Task = (
            TuneTask(tune_recipe(model_folder("llama"), tune="lora"))
            if kind == "tune_qa"
            else train_task(model_folder, kind)
        )
        trainer = Trainer(task, task.config.trainer, tmp_path / str(compiled))  # type: ignore[attr-defined]
        if compiled:  # as the trainer does on a GPU, where the graphs become kernels
            trainer._compiled = task.networks_to_compile()
            for network in trainer._compiled:
                network.compile(dynamic=True, backend="aot_eager")
        trainer.run()
        return task

    task = trained(compiled=False)
    torch._dynamo.reset()
    counters.clear()
    trained(compiled=True)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] >= len(task.networks_to_compile()) - 1  # equal encoders share theirs
    assert counters["stats"]["unique_graphs"] <= 8  # beyond which PyTorch compiles no more
    assert metrics(tmp_path / "True") == metrics(tmp_path / "False")


@pytest.mark.parametrize("changes", [{}, {"modulation": ModulationConfig(kind="lora")}])
def test_an_lm_under_hooks_is_not_compiled(model_folder: Folder, changes: dict[str, Any]) -> None:
    task = train_task(model_folder, "distilgpt2", **changes)
    assert bool(task.networks_to_compile()) == (not changes)
