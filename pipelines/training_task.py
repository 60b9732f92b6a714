"""The inputs of the trainer: a task, which is a model with its data, and how long and how fast to train it."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from mac_rag.config import Config
from mac_rag.lm.devices import default_device
from pipelines.checkpoints import require_same_shapes

_LOWER_IS_BETTER = ("loss", "perplexity", "error")  # how such figures of validations begin


class TrainerConfig(Config):
    """Length, speed and intervals of a training; every pipeline's YAML has these under `trainer:`.

    Attributes:
        steps: optimiser steps.
        batch_size: examples of one forward pass on one process.
        accumulate: forward passes per optimiser step; gradients are averaged over them.
        warmup_steps: steps of linear warm-up, after which `schedule` applies (constant in the paper).
        schedule_steps: step at which the schedule ends; None for the last step. With a later step, the run does not end
            at a rate of zero, which helps a run that starts from it.
        average_from: share of the steps after which the weights are averaged; at the end, their mean replaces the last
            weights. None for no mean.
        clip: largest gradient norm; longer gradients are scaled down.
        precision: `fp32`, or `bf16` for mixed precision.
        validate_every, save_every: intervals in steps.
        best: name of the validation figure that chooses the best checkpoint: the highest one or, of losses, perplexity
            and errors, the lowest.
        cpu: True to train on the CPU even if there is a GPU.
        parallel: the share of each of several processes: the whole model (`ddp`), or a part of its parameters,
            gradients and optimiser state, on its GPU (`fsdp`) or in the CPU's memory (`fsdp-offload`). One process
            trains as it does with `ddp`.
        gradient_checkpointing: keep only the inputs of a transformer's layers, and compute the rest again in the
            backward pass: less memory, and about a third more time.
    """

    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    accumulate: int = Field(1, ge=1)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    schedule_steps: int | None = Field(None, ge=1)
    average_from: float | None = Field(None, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float = Field(1.0, gt=0)
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    validate_every: int = Field(500, ge=1)
    save_every: int = Field(500, ge=1)
    best: str = "em"
    cpu: bool = False
    parallel: Literal["ddp", "fsdp", "fsdp-offload"] = "ddp"
    gradient_checkpointing: bool = False

    @model_validator(mode="after")
    def _check(self) -> TrainerConfig:
        if self.schedule_steps is not None and self.schedule_steps < self.steps:
            raise ValueError(f"schedule_steps is {self.schedule_steps}, before the last of {self.steps} steps")
        return self

    @property
    def best_is_lowest(self) -> bool:
        """True if a lower figure of `best` is better."""
        return self.best.startswith(_LOWER_IS_BETTER)

    @property
    def in_parts(self) -> bool:
        """True if each of several processes has a part of the model."""
        return self.parallel != "ddp"

    @property
    def device(self) -> torch.device:
        """Device on which to load the model: this process's GPU, or the CPU for `cpu` and parts of a sharded model."""
        sharded = self.in_parts and int(os.environ.get("WORLD_SIZE", "1")) > 1
        if self.cpu or sharded or not torch.cuda.is_available():
            return default_device("cpu")
        return default_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")

    def rate(self, step: int) -> float:
        """The learning rate of a step, as a share of `learning_rate`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        end = self.schedule_steps or self.steps
        done = (step - self.warmup_steps) / max(1, end - self.warmup_steps)
        if self.schedule == "linear":
            return max(0.0, 1.0 - done)
        if self.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return 1.0


class TrainingRecipe(Config):
    """Base of the recipes of tasks that train."""

    trainer: TrainerConfig


class Task(nn.Module, ABC):
    """A model with its data, losses and validation; a module, so that data-parallel wrappers see its forward pass.

    Attributes:
        passes: forward passes of one optimiser step over all processes; the trainer sets it.
    """

    passes: int = 1

    @abstractmethod
    def batch(self, step: int, micro: int, size: int) -> Any:
        """The batch of micro step `micro` of optimiser step `step`; a pure function of its arguments.

        `micro` counts over the accumulated passes of all processes, from 0 to `passes - 1`.
        """

    def begin_step(self, step: int) -> None:
        """Called before each optimiser step; a task may change its settings here."""

    @abstractmethod
    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Returns `loss` and any other scalars to log.

        With `trainer.parallel: fsdp`, it must call the layers of each network equally often on all processes. It then
        runs in `mac_rag.lm.batching.one_group`.
        """

    def networks_to_compile(self) -> Sequence[nn.Module]:
        """Networks that torch.compile turns into kernels of their own on a GPU, while the task trains."""
        return ()

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Figures on held-out data."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Exports the trained model in the form in which users load it."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Matrices with weight decay, vectors without.

        The learning rate of a group is multiplied by its `relative_rate`, if it has one.
        """
        trained = [p for p in self.parameters() if p.requires_grad]
        return [
            {"params": [p for p in trained if p.ndim >= 2]},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]

    def training_state(self) -> dict[str, Tensor]:
        """All tensors that training changes: trained parameters and persistent buffers, tied weights once."""
        persistent = self.state_dict(keep_vars=True).keys()
        state: dict[str, Tensor] = {name: p for name, p in self.named_parameters() if p.requires_grad}
        state |= {name: buffer for name, buffer in self.named_buffers() if name in persistent}
        return {name: tensor.detach().contiguous() for name, tensor in state.items()}

    def load_training_state(self, state: dict[str, Tensor]) -> None:
        """Restores what `training_state` returned.

        Raises:
            ModelLoadError: if a name or a shape differs; names them.
        """
        ours, theirs = ({name: tuple(t.shape) for name, t in s.items()} for s in (self.training_state(), state))
        require_same_shapes(ours, theirs)
        self.load_state_dict(state, strict=False)


def mixed(*numbers: int) -> int:
    """One seed from several numbers, so that neighbouring steps draw unrelated values."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (2**63 - 1)
    return seed


def shuffled(length: int, step: int, micro: int, size: int, *, seed: int, per_step: int) -> Sequence[int]:
    """Indices of a batch out of `length` items, each epoch in an order of its own; a pure function of its arguments.

    `per_step` is the number of examples of one optimiser step over all processes and micro steps.
    """
    first = step * per_step + micro * size
    indices, orders = [], {}
    for position in range(first, first + size):
        epoch, place = divmod(position, length)
        if epoch not in orders:
            orders[epoch] = torch.randperm(length, generator=torch.Generator().manual_seed(mixed(seed, epoch)))
        indices.append(int(orders[epoch][place]))
    return indices
