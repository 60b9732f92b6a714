"""Gradients and optimiser state in parts, one on each process, with whole weights: DeepSpeed's ZeRO, stage 2.

DeepSpeed is called directly: Accelerate hands it to GPUs alone, and what CPUs test here is what GPUs run. It flattens
the weights of each of the optimiser's groups into one row of numbers, of which each process updates its part.

It gives weights that a step does not reach a gradient of zero, where the other ways of training leave them alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, distributed, nn
from torch.autograd.graph import get_gradient_edge

from mac_rag.errors import ConfigError
from pipelines.training_task import Task, TrainerConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeroTask:
    """A task whose gradients and optimiser state lie in parts on all processes.

    Args:
        task: the task, whole, on each process's device.
        optimizer: an AdamW of the task's weights, which DeepSpeed takes over.
        accelerator: the processes.
        config: of the training.

    Attributes:
        engine: the task as DeepSpeed calls it.
        param_groups, state: as an optimiser's; the state is this process's part.

    Raises:
        ConfigError: without DeepSpeed.
    """

    def __init__(
        self, task: Task, optimizer: torch.optim.Optimizer, accelerator: Accelerator, config: TrainerConfig
    ) -> None:
        deepspeed = _deepspeed(accelerator.device)
        self._task = task
        self._accelerator = accelerator
        self._optimizer = optimizer
        self._names = {parameter: name for name, parameter in task.named_parameters()}
        self._scalars = [parameter for parameter in task.parameters() if parameter.ndim == 0]
        # DeepSpeed broadcasts the bytes of each weight, and a tensor without dimensions has no view as bytes. What
        # takes a scalar's gradients must be made before, or it would expect them in one dimension.
        self._edges = [get_gradient_edge(scalar) for scalar in self._scalars if scalar.requires_grad]
        for scalar in self._scalars:
            scalar.data = scalar.data.view(1)
        # DeepSpeed puts its rows of numbers in the place of the weights.
        self.param_groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        self.engine, self._zero, _, _ = deepspeed.initialize(
            model=task, optimizer=optimizer, config=_settings(config, accelerator), dist_init_required=False
        )
        self._restore_scalars()
        self._make_state()
        self.state = _LocalState(self)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of one forward pass; the last of a step divides the gradients among the processes."""
        self.engine.backward(loss, scale_wrt_gas=False)

    def end_pass(self) -> None:
        """Called behind each backward pass; behind the last of a step, clips the gradients and updates the weights."""
        for ours, theirs in zip(self.param_groups, self._optimizer.param_groups, strict=True):
            theirs["lr"] = ours["lr"]
        self.engine.step()
        self._restore_scalars()

    def gradient_norm(self) -> float:
        """The norm of the last step's gradients, before they were clipped."""
        return float(self.engine.get_global_grad_norm())

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """`pipelines.checkpoints.optimizer_tensors`, of the whole weights, on the main process; empty on the others.

        All processes must call it.
        """
        from deepspeed.utils import safe_get_full_optimizer_state

        gathered: dict[str, Tensor] = {}
        main = self._accelerator.is_main_process
        for parameter in self._trained():
            for key in _MOMENTS:
                whole = safe_get_full_optimizer_state(parameter, key)
                if main:
                    gathered[f"{key}/{self._names[parameter]}"] = whole.to("cpu", parameter.dtype)
            if main:
                gathered[f"step/{self._names[parameter]}"] = self._steps_taken().cpu().clone()
        return gathered

    def take_weights(self) -> None:
        """Takes over weights that the task has loaded."""
        self._zero.refresh_fp32_params()

    def load(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        """Takes a weight's state, whole, of which it keeps this process's part."""
        from deepspeed.utils import safe_set_full_optimizer_state

        for key in _MOMENTS:
            safe_set_full_optimizer_state(parameter, state[key], key)
        for kept in self._optimizer.state.values():  # one for a whole group of weights
            kept["step"].fill_(max(float(kept["step"]), float(state["step"])))

    def local_parts(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """This process's part of a weight's optimiser state, with the weight's copy in fp32; empty if it has none."""
        part = getattr(parameter, "_hp_mapping", None)
        if part is None or part.optim_fragment is None:
            return {}
        return {"weight": part.hp_fragment, **part.optim_fragment}

    def local_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """A tensor of the size of this process's part of a weight's gradient; None for frozen weights."""
        part = getattr(parameter, "_hp_mapping", None)
        return None if part is None else part.hp_fragment

    def release(self) -> None:
        """Takes DeepSpeed's hooks off the task."""
        self.engine.destroy()

    def _make_state(self) -> None:
        """Makes the optimiser's state, of all groups at once: DeepSpeed would find that of the first group alone."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0
            for flat in group["params"]:
                flat.grad = torch.zeros_like(flat)
        self._optimizer.step()  # without gradients and without a learning rate, it changes no weight
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
            for flat in group["params"]:
                flat.grad = None
                self._optimizer.state[flat]["step"].zero_()
        self._zero._lazy_init_hp_params_optimizer_state()

    def _trained(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self._task.parameters() if hasattr(parameter, "_hp_mapping"))

    def _steps_taken(self) -> Tensor:
        steps: Tensor = next(iter(self._optimizer.state.values()))["step"]
        return steps

    def _restore_scalars(self) -> None:
        for scalar in self._scalars:
            scalar.data = scalar.data.view(())


class _LocalState:
    """The state of an optimiser, by weight: reading gives this process's part, and what is set is divided."""

    def __init__(self, task: ZeroTask) -> None:
        self._task = task

    def get(self, parameter: nn.Parameter, default: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._task.local_parts(parameter) or default

    def __setitem__(self, parameter: nn.Parameter, state: Mapping[str, Tensor]) -> None:
        self._task.load(parameter, state)


def _settings(config: TrainerConfig, accelerator: Accelerator) -> dict[str, Any]:
    mixed = {"torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}}
    return {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": config.accumulate,
        "train_batch_size": config.batch_size * config.accumulate * accelerator.num_processes,
        "gradient_clipping": config.clip,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,  # AdamW with fused kernels
        "steps_per_print": None,
        **(mixed if config.precision == "bf16" else {}),
    }


def _deepspeed(device: torch.device) -> Any:
    """The package, which looks for GPUs as it is imported.

    Raises:
        ConfigError: where it is not installed.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(
            f"trainer.parallel is zero, but DeepSpeed cannot be imported ({error}); pip install 'mac-rag[deepspeed]'"
        ) from None
    deepspeed.init_distributed(dist_backend=distributed.get_backend())
    return deepspeed
