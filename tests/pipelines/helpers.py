"""Short runs of the pipelines, their logs, and commands as a test calls them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner, Result

from pipelines.tasks.tune_qa import TuneConfig

TRAINER = {
    "steps": 4, "batch_size": 3, "learning_rate": 1e-3, "validate_every": 2, "save_every": 2,
    "cpu": True,
}  # fmt: skip


DATA = {"name": "newswire", "documents": 40, "validation_documents": 6}


# Of the task pretrain, whose sizes are constants.
SHORT_PRETRAINING = {"_DOCUMENTS": 60, "_VALIDATION_DOCUMENTS": 4, "_COPY_STEPS": 2}


def tune_recipe(lm: Path | str, **values: Any) -> TuneConfig:
    """A short tuning of an LM on newswire, with two retrieved documents in front of the questions."""
    base = {"base_lm": {"name": str(lm)}, "data": DATA, "context": {"retriever": "bm25", "k": [2]}, "trainer": TRAINER}
    return TuneConfig.parse({**base, **values}, "test")


def metrics(output: Path) -> list[dict[str, Any]]:
    """The lines of a run's log without what is measured of the machine."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def command(module: str, *options: str) -> Result:
    """Runs a command of the pipelines in this process."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(importlib.import_module(module).main)
    return CliRunner().invoke(app, options)
