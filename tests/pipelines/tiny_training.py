"""Short trainings of the real tasks on tiny models; also a command, so that tests can start it in several processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from pipelines.tasks import tune_reading
from pipelines.tasks.train import TrainTask
from pipelines.tasks.train_config import TrainConfig
from pipelines.tasks.tune_qa import TuneConfig, TuneTask
from pipelines.tasks.tune_reading import TuneReadingConfig, TuneReadingTask
from pipelines.trainer import Trainer

_RECIPES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "tune_qa": (TuneConfig, TuneTask, {"context": {"retriever": "bm25", "k": [1]}}),
    "tune_reading": (
        TuneReadingConfig,
        TuneReadingTask,
        {
            "turn": "Context: {document}\n\nQuestion: {question}",
            "packs": {"documents": [1, 2, 3], "questions": 4, "absent": 0.2},
            "compression": [16, 32],
        },
    ),
    "train": (
        TrainConfig,
        TrainTask,
        {
            "model": {
                "tokens": 3,
                "max_new_tokens": 4,
                "aggregation": {"blocks": 2, "heads": 2, "head_width": 8, "prior_width": 8},
            },
            "questions_per_document": 2,
            "backprop_dropout": 0.5,
            "losses": {"answer": 1, "direct": 1, "reconstruction": 1, "contrastive": 1},
            "context": {"retriever": "bm25", "k": [1, 2], "rate": 0.5, "gold_rate": 0.5},
        },
    ),
}
_TRAINER = {
    "steps": 20, "batch_size": 2, "learning_rate": 1e-3, "weight_decay": 0.1, "clip": 0.5, "validate_every": 10,
    "save_every": 6, "best": "loss", "cpu": True,
}  # fmt: skip


def train(
    output: Path, kind: str, models: Path, values: dict[str, Any], *, double: bool = True, kill: int | None = None
) -> None:
    """Trains a task on newswire.

    Args:
        output: the run's folder.
        kind: `tune_qa` or `train`.
        models: folder of the folders `llama` and `t5`.
        values: further values of the recipe; those of a mapping are set one by one.
        double: True trains in float64.
        kill: step in which the last process dies as by kill -9; None for none.
    """
    config, make, recipe = _RECIPES[kind]
    tune_reading._VALIDATED = 4
    recipe = merged(recipe, {"data": {"name": "newswire", "documents": 40, "validation_documents": 4}})
    lm = {"base_lm": {"name": str(models / ("instruct" if kind == "tune_reading" else "llama"))}}
    encoders = {
        "amortization": {"design": "encoder-decoder", "name": str(models / "t5")},
        "input_encoder": {"design": "decoder-only", "name": None},
    }
    recipe = merged(recipe, {"model": lm | encoders} if kind == "train" else lm)
    parsed = config.parse(merged(merged(recipe, {"trainer": _TRAINER}), values), kind)
    if best := {"tune_qa": "f1", "tune_reading": "f1_right"}.get(kind):
        parsed = parsed.model_copy(update={"trainer": parsed.trainer.model_copy(update={"best": best})})
    task = make(parsed)
    if double:
        task.double()
        if kind == "train":
            task.validate = task._losses  # a bank holds float32
    draw = task.batch

    def batch(step: int, micro: int, size: int) -> Any:
        if step == kill and int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(step, micro, size)

    task.batch = batch
    Trainer(task, parsed.trainer, output).run()


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The values of two nested mappings; where both have one, the second's."""
    both = {**first, **second}
    for name in first.keys() & second.keys():
        if isinstance(first[name], dict) and isinstance(second[name], dict):
            both[name] = merged(first[name], second[name])
    return both


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = json.loads(sys.argv[1])
    train(Path(arguments.pop("output")), models=Path(arguments.pop("models")), **arguments)
