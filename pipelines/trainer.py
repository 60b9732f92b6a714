"""The training loop of all pipelines: Accelerate, exact resume, validation, best and last checkpoints.

A run is a pure function of its configuration. The batch of step `i` depends on the seed, `i` and the process alone, and
all randomness of a step is seeded from the same numbers. So a run that is killed and started again has the same batches
and the same dropout as one that never stopped. The checkpoint holds parameters, optimiser and step
(`pipelines.checkpoints`).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed.nn  # a later import, as by DDP, would bind the process group in its defaults
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, ProjectConfiguration, gather_object
from torch import Tensor

from mac_rag.atomic_files import write_folder, write_text
from mac_rag.errors import ConfigError, DataError
from mac_rag.lm.batching import one_group
from mac_rag.progress import progress_bar
from pipelines.averaging import WeightMean
from pipelines.checkpoints import Checkpoints, Progress, logged_until, optimizer_tensors
from pipelines.recomputation import recompute_activations
from pipelines.sharding import ShardedTask
from pipelines.training_task import Task, TrainerConfig, TrainingRecipe, mixed, shuffled

__all__ = ["Task", "Trainer", "TrainerConfig", "TrainingRecipe", "shuffled"]


class Trainer:
    """Trains a task to its last step. It resumes from the newest checkpoint in the folder, if there is one.

    Args:
        output: the run's folder: `metrics.jsonl`, `tensorboard/`, `checkpoints/`, and the exported `best/` and `last/`.
        label: label of the progress bar.

    Raises:
        ConfigError: if Accelerate's own configuration asks for FSDP or DeepSpeed.
    """

    def __init__(self, task: Task, config: TrainerConfig, output: Path, *, label: str = "train") -> None:
        self.config = config
        self.output = output
        self._label = label
        output.mkdir(parents=True, exist_ok=True)
        self.accelerator = _accelerator(config, output)
        self.checkpoints = Checkpoints(output / "checkpoints", self.accelerator)
        self.task = task
        task.passes = config.accumulate * self.accelerator.num_processes
        if config.gradient_checkpointing:
            recompute_activations(task)
        if self.accelerator.device.type == "cuda":
            # cuDNN's attention, which PyTorch prefers on some GPUs, plans for each new shape, which takes longer than a
            # small model's attention; texts of other lengths make other shapes.
            torch.backends.cuda.enable_cudnn_sdp(False)
            torch.set_float32_matmul_precision("high")  # TF32 in the layers that a recipe keeps in fp32
        self._sharded: ShardedTask | None = None
        self._compiled: Sequence[torch.nn.Module] = ()
        if config.in_parts and self.accelerator.num_processes > 1:
            self._sharded = ShardedTask(task, self.accelerator, offload=config.parallel == "fsdp-offload")
            self.model: torch.nn.Module = task
        else:
            if self.accelerator.device.type == "cuda":
                self._compiled = task.networks_to_compile()
            for network in self._compiled:
                network.compile(dynamic=True)  # in place
            self.model = self.accelerator.prepare(task.to(self.accelerator.device))
        # After the sharding, which replaces the parameters.
        groups = task.parameter_groups() if self._sharded is None else self._sharded.parameter_groups()
        self.optimizer = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        start = config.average_from
        self._weight_mean = None if start is None else WeightMean(task, config.steps, start)
        self.step = 0
        self.best: float | None = None

    def run(self) -> dict[str, float]:
        """Trains, validates, saves.

        Returns:
            The figures of the last validation; empty if the run was already done, and on all processes but the first.

        Raises:
            ConfigError: if the loss is no longer finite, `trainer.best` is not a figure of the validation, or the
                checkpoint was made with another number of passes in a step.
            ModelLoadError: if the folder's checkpoint belongs to another configuration.
            DataError: if it is damaged.
        """
        if self._resume():
            self._leave()
            return {}
        config, main = self.config, self.accelerator.is_main_process
        self.accelerator.init_trackers("tensorboard", config={})
        figures: dict[str, float] = {}
        with progress_bar(self._label, config.steps, done=self.step, disable=not main) as bar:
            while self.step < config.steps:
                began = time.perf_counter()
                scalars = self._optimiser_step()
                self.step += 1
                self._log("train", {**scalars, "seconds": time.perf_counter() - began})
                bar.note(f"loss {scalars['loss']:.4f}  rate {scalars['rate']:.2e}")
                bar.advance()
                last = self.step == config.steps
                if self._weight_mean is not None:
                    self._weight_mean.add(self.step)
                    if last:
                        self._weight_mean.put()
                if self.step % config.validate_every == 0 or last:
                    figures = self._validate()
                    shown = [f"{name} {value:.4f}" for name, value in figures.items()]
                    bar.write("  ".join([f"{self._label}: step {self.step} of {config.steps}", *shown]))
                if self.step % config.save_every == 0 or last:
                    self._checkpoint()
        with self._whole(torch.device("cpu")) as whole:
            if whole:
                self._export("last")
        self.checkpoints.finish(self._progress())
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
            group["lr"] = rate * group.get("relative_rate", 1.0)
        if self._sharded is not None:
            self._sharded.begin_step()
        self.task.begin_step(self.step)
        self.model.train()
        total: dict[str, Tensor] = {}
        for index in range(config.accumulate):
            micro = index * accelerator.num_processes + accelerator.process_index
            torch.manual_seed(mixed(config.seed, self.step, micro))
            batch = self.task.batch(self.step, micro, config.batch_size)
            with self._synchronise(last=index == config.accumulate - 1):
                with accelerator.autocast(), one_group() if config.in_parts else nullcontext():
                    scalars = self.model(batch)
                accelerator.backward(scalars["loss"] / config.accumulate)
            for name, value in scalars.items():
                total[name] = total.get(name, 0) + value.detach() / config.accumulate
        norm = self._update()
        mean = self._mean({name: float(value) for name, value in total.items()})
        if not math.isfinite(mean["loss"]):
            raise ConfigError(f"the loss became {mean['loss']} at step {self.step}; lower trainer.learning_rate")
        return {**mean, "rate": rate, "gradient_norm": norm}

    def _update(self) -> float:
        """Clips the gradients and updates the weights; returns the norm of the gradients before."""
        if self._sharded is None:
            norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip))
        else:
            norm = self._sharded.clip_gradients(self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    @contextmanager
    def _synchronise(self, last: bool) -> Iterator[None]:
        """Averages the gradients of several processes once, on the last pass of an optimiser step.

        Sharded gradients are averaged in each pass: a process would have no room for all of them.
        """
        if last or self._sharded is not None:
            yield
        else:
            with self.accelerator.no_sync(self.model):
                yield

    def _mean(self, scalars: dict[str, float]) -> dict[str, float]:
        """The mean of each scalar over the processes that have it; a batch need not have all of them."""
        if self.accelerator.num_processes == 1:
            return scalars
        everyone: list[dict[str, float]] = gather_object([scalars])
        names = dict.fromkeys(name for one in everyone for name in one)
        values = {name: [one[name] for one in everyone if name in one] for name in names}
        return {name: sum(of) / len(of) for name, of in values.items()}

    @contextmanager
    def _whole(self, device: torch.device) -> Iterator[bool]:
        """A context in which the main process has the whole task; it alone gets True."""
        if self._sharded is not None:
            with self._sharded.whole(device) as main:
                yield main
        else:
            yield self.accelerator.is_main_process
            self.accelerator.wait_for_everyone()

    def _validate(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        with self._whole(self.accelerator.device) as whole:
            if whole:
                self.task.eval()
                # A cache that grows with each token of an answer would be compiled again and again.
                eager = torch.compiler.set_stance("force_eager") if self._compiled else nullcontext()
                with torch.no_grad(), eager:
                    figures = self.task.validate()
                self._log("val", figures)
                if self.config.best not in figures:
                    raise ConfigError(f"trainer.best names {self.config.best!r}; validation gives {sorted(figures)}")
                value = figures[self.config.best]
                sign = -1 if self.config.best_is_lowest else 1
                if self.best is None or math.isnan(self.best) or sign * value > sign * self.best:
                    self.best = value
                    self._export("best")
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

    def _state(self, step: int) -> dict[str, Tensor]:
        """The trained tensors of a checkpoint after so many steps."""
        return self.task.training_state() | ({} if self._weight_mean is None else self._weight_mean.state(step))

    def _progress(self) -> Progress:
        return Progress(self.step, self.best, self.task.passes, finished=False)

    def _checkpoint(self) -> None:
        state = optimizer_tensors(self.optimizer, self.task)
        self.checkpoints.write(self._state(self.step), state, self._progress())

    def _resume(self) -> bool:
        """Restores the state of the folder's newest checkpoint; returns True if the run was finished there."""
        progress = self.checkpoints.newest_progress()
        if progress is not None and progress.finished:
            if not (self.output / "last").exists():
                raise DataError(f"{self.output} was finished, but {self.output / 'last'} is gone; delete {self.output}")
            return True
        if progress is not None:
            if progress.passes != self.task.passes:
                raise ConfigError(
                    f"{self.output} was trained with {progress.passes} passes a step (trainer.accumulate x processes), "
                    f"and now there are {self.task.passes}; start as many processes as before"
                )
            self.checkpoints.read(self._load, self._state(progress.step), self.optimizer, self.task)
            self.step, self.best = progress.step, progress.best
            self.accelerator.print(f"resumed {self.output} at step {self.step}")
        self._keep_metrics()
        self.checkpoints.tidy()
        return False

    def _load(self, state: dict[str, Tensor]) -> None:
        self.task.load_training_state(state if self._weight_mean is None else self._weight_mean.load(state))

    def _keep_metrics(self) -> None:
        """Drops the log's lines after the current step; the following steps write them again."""
        log = self.output / "metrics.jsonl"
        if not self.accelerator.is_main_process or not log.exists():
            return
        write_text(log, logged_until(log, self.step))


def _accelerator(config: TrainerConfig, output: Path) -> Accelerator:
    for engine in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true":
            raise ConfigError(
                f"Accelerate's configuration asks for {engine}, but a recipe says how processes share a model: take it "
                "out of the configuration, and set trainer.parallel: fsdp"
            )
    AcceleratorState._reset_state()  # the process may have trained in another precision before
    return Accelerator(
        # Without a GPU, several processes find each other only if they are set to the CPU.
        cpu=config.cpu or (int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.cuda.is_available()),
        mixed_precision="bf16" if config.precision == "bf16" else "no",
        log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=str(output), logging_dir=str(output)),
        kwargs_handlers=[
            # A batch need not reach every weight: the first steps of MAC train without the aggregation network.
            DistributedDataParallelKwargs(find_unused_parameters=True),
            # All others wait while one process validates.
            InitProcessGroupKwargs(timeout=timedelta(hours=12)),
        ],
    )
