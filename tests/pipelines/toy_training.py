"""A training small enough for tests; also a command, so that tests can start it in several processes."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from pipelines.trainer import Task, Trainer, TrainerConfig, shuffled

ITEMS = 48
Place: TypeAlias = tuple[str, int]  # `batch`, `validate` or `save`, and a step


class ToyTask(Task):
    """Regression by two layers with dropout between them, on fixed random data.

    Args:
        dropout: its probability; drawn anew for every pass.
        kill: where the process dies as by kill -9.
        stop: where the training is interrupted by Ctrl-C.
    """

    def __init__(self, dropout: float = 0.0, kill: Place | None = None, stop: Place | None = None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        generator = torch.Generator().manual_seed(8)
        self.x = torch.randn(ITEMS, 6, generator=generator)
        self.y = self.x.prod(dim=1, keepdim=True)
        self.kill, self.stop = kill, stop
        self.now = 0
        self.drawn: list[int] = []

    def _reached(self, place: str) -> None:
        if self.kill == (place, self.now):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.stop == (place, self.now):
            raise KeyboardInterrupt

    def batch(self, step: int, micro: int, size: int) -> tuple[Tensor, Tensor]:
        self.now = step
        self._reached("batch")
        indices = shuffled(ITEMS, step, micro, size, seed=3, per_step=size * self.passes)
        self.drawn += indices
        return self.x[indices], self.y[indices]

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, y = batch
        self.seen += len(x)
        loss = functional.mse_loss(self.layers(x), y)
        return {"loss": loss, "root": loss.sqrt()}

    def validate(self) -> dict[str, float]:
        self._reached("validate")
        assert not self.training
        error = float(functional.mse_loss(self.layers(self.x), self.y))
        return {"error": error, "gain": -error, "seen": float(self.seen)}

    def save(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._reached("save")
        save_file(dict(self.layers.state_dict()), folder / "model.safetensors")


def train(
    output: Path, *, dropout: float = 0.0, kill: Place | None = None, stop: Place | None = None, **trainer: Any
) -> tuple[ToyTask, dict[str, float]]:
    """Trains 24 steps, or as `trainer` says; returns the task and the last figures."""
    values = {
        "steps": 24, "batch_size": 8, "learning_rate": 0.01, "warmup_steps": 4, "schedule": "cosine",
        "weight_decay": 0.01, "validate_every": 6, "save_every": 8, "best": "error",
        "cpu": True, **trainer,
    }  # fmt: skip
    task = ToyTask(dropout, kill, stop)
    return task, Trainer(task, TrainerConfig.parse(values, "toy"), output).run()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    train(parser.parse_args().output)
    print("threads:", *(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")))
