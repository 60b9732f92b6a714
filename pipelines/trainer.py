"""The training loop of all pipelines: Accelerate, exact resume, validation, best and last checkpoints.

A run is a pure function of its configuration. The batch of step `i` depends on the seed, `i` and the process alone, and
all randomness of a step is seeded from the same numbers. So a run that is killed and started again has the same batches
and the same dropout as one that never stopped. The checkpoint holds parameters, optimiser and step.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.nn  # imported later, as by DDP, its functions' defaults would hold the process group
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration
from pydantic import Field, model_validator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mac_rag.atomic_files import write_folder, write_text
from mac_rag.config import Config
from mac_rag.errors import ConfigError, ModelLoadError
from mac_rag.lm.devices import default_device
from mac_rag.progress import progress_bar
from pipelines.resumption import checkpoints_in, logged_until, progress_of


class TrainerConfig(Config):
    """How long and how fast to train; every pipeline's YAML has these under `trainer:`.

    Attributes:
        steps: optimiser steps.
        batch_size: examples of one forward pass on one process.
        accumulate: forward passes per optimiser step; gradients are averaged over them.
        warmup_steps: steps of linear warm-up, after which `schedule` applies (constant in the paper).
        schedule_steps: step at which the schedule ends; None for the last step. With a later step, the run does not
            end at a rate of zero, which helps a run that starts from it.
        clip: largest gradient norm; longer gradients are scaled down.
        precision: `fp32`, or `bf16` for mixed precision.
        validate_every, save_every, log_every: intervals in steps.
        best: name of the validation figure that chooses the best checkpoint.
        best_mode: `max` if a higher figure is better, `min` if a lower one is.
        cpu: True to train on the CPU even if there is a GPU.
    """

    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    accumulate: int = Field(1, ge=1)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    schedule_steps: int | None = Field(None, ge=1)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float = Field(1.0, gt=0)
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    validate_every: int = Field(500, ge=1)
    save_every: int = Field(500, ge=1)
    log_every: int = Field(25, ge=1)
    best: str = "em"
    best_mode: Literal["max", "min"] = "max"
    cpu: bool = False

    @model_validator(mode="after")
    def _check(self) -> TrainerConfig:
        if self.schedule_steps is not None and self.schedule_steps < self.steps:
            raise ValueError(f"schedule_steps is {self.schedule_steps}, before the last of {self.steps} steps")
        return self

    @property
    def device(self) -> torch.device:
        """Where to train: a GPU if there is one, unless `cpu`."""
        return default_device("cpu" if self.cpu else None)

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
        """Returns `loss` and any other scalars to log."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Figures on held-out data."""

    def speed(self, examples: float) -> dict[str, float]:
        """Figures of speed to log; `examples` is the number of examples per second over all processes."""
        return {}

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Exports the trained model in the form in which users load it."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Matrices with weight decay, vectors without."""
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
            ModelLoadError: when a name or a shape differs; names them.
        """
        ours, theirs = ({name: tensor.shape for name, tensor in s.items()} for s in (self.training_state(), state))
        differ = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        if differ:
            raise ModelLoadError(f"the checkpoint belongs to another configuration; what differs: {', '.join(differ)}")
        self.load_state_dict(state, strict=False)


class Trainer:
    """Trains a task to its last step. It resumes from the newest checkpoint in the folder, if there is one.

    Args:
        task: the task.
        config: length, learning rate and intervals of the training.
        output: the run's folder: `metrics.jsonl`, `tensorboard/`, `checkpoints/`, and the exported `best/` and `last/`.
        label: label of the progress bar.
    """

    def __init__(self, task: Task, config: TrainerConfig, output: Path, *, label: str = "train") -> None:
        self.config = config
        self.output = output
        self._label = label
        output.mkdir(parents=True, exist_ok=True)
        AcceleratorState._reset_state()  # the process may have trained in another precision before
        self.accelerator = Accelerator(
            cpu=config.cpu,
            mixed_precision="bf16" if config.precision == "bf16" else "no",
            log_with="tensorboard",
            project_config=ProjectConfiguration(project_dir=str(output), logging_dir=str(output)),
            # A batch need not reach every weight: the first steps of MAC train without the aggregation network.
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        optimizer = torch.optim.AdamW(
            task.parameter_groups(),
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.task = task
        task.passes = config.accumulate * self.accelerator.num_processes
        task.to(self.accelerator.device)
        self.step = 0
        self.best: float | None = None
        self.model, self.optimizer = self.accelerator.prepare(task, optimizer)

    def run(self) -> dict[str, float]:
        """Trains, validates, saves.

        Returns:
            The figures of the last validation; empty if the run was already done, and on all processes but the first.

        Raises:
            ConfigError: when the loss is no longer finite, or `trainer.best` is not a figure of the validation.
            ModelLoadError: when the folder's checkpoint belongs to another configuration.
        """
        self._resume()
        config, main = self.config, self.accelerator.is_main_process
        self.accelerator.init_trackers("tensorboard", config={})
        figures: dict[str, float] = {}
        seconds, timed = 0.0, 0
        with progress_bar(self._label, config.steps, done=self.step, disable=not main) as bar:
            while self.step < config.steps:
                began = time.perf_counter()
                scalars = self._optimiser_step()
                self.step += 1
                seconds += time.perf_counter() - began
                timed += 1
                if self.step % config.log_every == 0 or self.step == config.steps:
                    scalars["seconds_per_step"] = seconds / timed
                    scalars |= self.task.speed(config.batch_size * self.task.passes * timed / seconds)
                    seconds, timed = 0.0, 0
                    self._log("train", scalars)
                    bar.note(f"loss {scalars['loss']:.4f}  rate {scalars['rate']:.2e}")
                bar.advance()
                last = self.step == config.steps
                if self.step % config.validate_every == 0 or last:
                    figures = self._validate()
                    shown = [f"{name} {value:.4f}" for name, value in figures.items()]
                    bar.write("  ".join([f"{self._label}: step {self.step} of {config.steps}", *shown]))
                if self.step % config.save_every == 0 or last:
                    self._checkpoint()
        if main:
            self._export("last")
        self._leave()
        return figures

    def _leave(self) -> None:
        """Ends the process group and its threads before the interpreter shuts down.

        A thread that releases a tensor while the interpreter shuts down aborts the process.
        """
        # All processes together: one that ends the group while others still work can leave them hanging.
        self.accelerator.wait_for_everyone()
        self.model = self.task
        self.accelerator.free_memory()
        self.accelerator.end_training()

    def _optimiser_step(self) -> dict[str, float]:
        config, accelerator = self.config, self.accelerator
        rate = config.learning_rate * config.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.task.begin_step(self.step)
        self.model.train()
        total: dict[str, Tensor] = {}
        for index in range(config.accumulate):
            micro = index * accelerator.num_processes + accelerator.process_index
            torch.manual_seed(_mix(config.seed, self.step, micro))
            batch = self.task.batch(self.step, micro, config.batch_size)
            with _synchronise(accelerator, self.model, last=index == config.accumulate - 1):
                with accelerator.autocast():
                    scalars = self.model(batch)
                accelerator.backward(scalars["loss"] / config.accumulate)
            for name, value in scalars.items():
                total[name] = total.get(name, 0) + value.detach() / config.accumulate
        norm = accelerator.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not torch.isfinite(total["loss"]):
            raise ConfigError(
                f"the loss became {float(total['loss'])} at step {self.step}; lower trainer.learning_rate"
            )
        mean = {name: float(accelerator.reduce(value, "mean")) for name, value in total.items()}
        return {**mean, "rate": rate, "gradient_norm": float(norm)}

    def _validate(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        if self.accelerator.is_main_process:
            self.task.eval()
            with torch.no_grad():
                figures = self.task.validate()
            self._log("val", figures)
            if self.config.best not in figures:
                raise ConfigError(f"trainer.best names {self.config.best!r}; validation gives {sorted(figures)}")
            value = figures[self.config.best]
            sign = 1 if self.config.best_mode == "max" else -1
            if self.best is None or math.isnan(self.best) or sign * value > sign * self.best:
                self.best = value
                self._export("best")
        self.accelerator.wait_for_everyone()
        return figures

    def _log(self, kind: str, scalars: dict[str, float]) -> None:
        if self.accelerator.is_main_process:
            with (self.output / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"kind": kind, "step": self.step, **scalars}) + "\n")
        self.accelerator.log({f"{kind}/{name}": value for name, value in scalars.items()}, step=self.step)

    def _export(self, name: str) -> None:
        """Writes the model beside its old version and swaps the two, so that a kill leaves one of them whole."""
        with write_folder(self.output / name) as new:
            self.task.save(new)

    def _checkpoint(self) -> None:
        if not self.accelerator.is_main_process:
            self.accelerator.wait_for_everyone()
            return
        folder = self.output / "checkpoints"
        with write_folder(folder / f"step-{self.step:08d}") as new:
            save_file(self.task.training_state(), new / "model.safetensors")
            torch.save(self.optimizer.state_dict(), new / "optimizer.pt")
            best = self.best if self.best is not None and math.isfinite(self.best) else None  # JSON has no others
            (new / "trainer.json").write_text(json.dumps({"step": self.step, "best": best}))
        for older in checkpoints_in(folder)[:-1]:
            shutil.rmtree(older)
        self.accelerator.wait_for_everyone()

    def _resume(self) -> None:
        checkpoints = checkpoints_in(self.output / "checkpoints")
        if not checkpoints:
            self._keep_metrics()
            return
        newest = checkpoints[-1]
        step, best = progress_of(newest)
        self.task.load_training_state(load_file(newest / "model.safetensors"))
        self.optimizer.load_state_dict(torch.load(newest / "optimizer.pt", map_location="cpu", weights_only=True))
        self.step, self.best = step, best
        self._keep_metrics()
        self.accelerator.print(f"resumed {self.output} at step {self.step}")

    def _keep_metrics(self) -> None:
        """Drops the log's lines beyond the current step; the steps to come write them again."""
        log = self.output / "metrics.jsonl"
        if not self.accelerator.is_main_process or not log.exists():
            return
        write_text(log, logged_until(log, self.step))


def _mix(*numbers: int) -> int:
    """One seed from several numbers, so that neighbouring steps draw unrelated values."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (2**63 - 1)
    return seed


@contextmanager
def _synchronise(accelerator: Accelerator, model: nn.Module, last: bool) -> Iterator[None]:
    """Averages the gradients of several processes once, on the last pass of an optimiser step."""
    if last:
        yield
    else:
        with accelerator.no_sync(model):
            yield


def shuffled(length: int, step: int, micro: int, size: int, *, seed: int, per_step: int) -> Sequence[int]:
    """Indices of a batch out of `length` items, each epoch in an order of its own; a pure function of its arguments.

    Args:
        per_step: examples of one optimiser step over all processes and micro steps.
    """
    first = step * per_step + micro * size
    indices, orders = [], {}
    for position in range(first, first + size):
        epoch, place = divmod(position, length)
        if epoch not in orders:
            orders[epoch] = torch.randperm(length, generator=torch.Generator().manual_seed(_mix(seed, epoch)))
        indices.append(int(orders[epoch][place]))
    return indices
