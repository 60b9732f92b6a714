"""Parameters, gradients and optimiser state in parts, one on each process (FSDP2, `fully_shard`).

A transformer's layer is whole only while it runs, in the forward pass and again in the backward pass. Embeddings and
MAC's own networks are whole from the beginning of a step to its end, because methods beside `forward` use them.

PyTorch's engine is called directly: Accelerate uses it on GPUs alone, and here tests on CPUs run the same code as GPUs.

The processes gather a layer together each time it is called. So they must call all layers equally often: during such a
training, rows of all lengths share one batch (`mac_rag.lm.batching.one_group`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from accelerate import Accelerator
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mac_rag.errors import ConfigError
from mac_rag.nn.amortization import TokenMLPs
from mac_rag.nn.modulation import ModulationNetwork
from pipelines.recomputation import transformer_layers
from pipelines.training_task import Task

Hooks: TypeAlias = "OrderedDict[int, Callable[..., Any]]"


class _Unit(NamedTuple):
    """A module that is sharded as a whole, with its state before: class, names of attributes, and forward hooks."""

    module: nn.Module
    kind: type[nn.Module]
    attributes: frozenset[str]
    pre_hooks: Hooks
    hooks: Hooks


class ShardedTask:
    """A task whose parameters lie in parts on all processes; it is changed in place.

    Args:
        task: the task, whole, on the CPU or on each process's device.
        offload: True keeps the parts, their gradients and the optimiser's state in the CPU's memory.

    Raises:
        ConfigError: for quantised weights.
    """

    def __init__(self, task: Task, accelerator: Accelerator, *, offload: bool) -> None:
        self._task = task
        self._accelerator = accelerator
        self._device = accelerator.device
        for name, parameter in task.named_parameters():
            if not parameter.is_floating_point():
                raise ConfigError(
                    f"trainer.parallel is fsdp, but {name} is quantised ({parameter.dtype}) and cannot be divided; set "
                    "quantization: none"
                )
        # FSDP2 divides rows, which scalars have none of: each process has them all.
        self._scalars = [parameter for parameter in task.parameters() if parameter.ndim == 0]
        for scalar in self._scalars:
            scalar.data = scalar.data.to(self._device)
            distributed.broadcast(scalar.data, 0)
        mesh = init_device_mesh(self._device.type, (accelerator.num_processes,))
        policy = CPUOffloadPolicy(pin_memory=self._device.type == "cuda") if offload else OffloadPolicy()
        modules = [*_units(task), task]
        self._units = [
            _Unit(m, type(m), frozenset(vars(m)), OrderedDict(m._forward_pre_hooks), OrderedDict(m._forward_hooks))
            for m in modules
        ]
        for module in modules:
            fully_shard(module, mesh=mesh, ignored_params=set(self._scalars), offload_policy=policy)
        for module in modules:
            assert isinstance(module, FSDPModule)
            if self._device.type == "cpu":
                module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
        self._find_root()

    @torch.no_grad()
    def _find_root(self) -> None:
        """Runs the task's hooks around an empty forward pass.

        FSDP2 takes the module that runs first for the root, and a task may run its LM before its own forward pass.
        """
        assert isinstance(self._task, FSDPModule)
        task: Any = self._task
        task.forward = dict  # returns an empty mapping
        task()
        del task.forward
        self._task.reshard()

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The task's groups of parameters, each divided into tensors and scalars: no kernel takes both."""
        scalars = set(self._scalars)
        groups = []
        for group in self._task.parameter_groups():
            for apart in (False, True):
                chosen = [parameter for parameter in group["params"] if (parameter in scalars) == apart]
                groups += [{**group, "params": chosen}] if chosen else []
        return groups

    def begin_step(self) -> None:
        """Gathers the parameters that are whole during a step; the end of the backward pass divides them again."""
        assert isinstance(self._task, FSDPModule)
        self._task.unshard()

    def clip_gradients(self, limit: float) -> float:
        """Averages the gradients that FSDP2 does not, and scales all down to a norm of `limit`; returns their norm."""
        self._average_scalars()
        parts = [p.grad.to_local() for p in self._task.parameters() if isinstance(p.grad, DTensor)]
        total = _squares(parts).to(self._device)
        distributed.all_reduce(total)
        scalars = [p.grad for p in self._scalars if p.grad is not None]
        norm = float((total + _squares(scalars).to(self._device)).sqrt())
        if norm > limit:
            for gradient in (*parts, *scalars):
                gradient.mul_(limit / (norm + 1e-6))
        return norm

    def _average_scalars(self) -> None:
        trained = [p for p in self._scalars if p.requires_grad]
        if not trained:
            return
        had = torch.tensor([p.grad is not None for p in trained], device=self._device, dtype=torch.int32)
        distributed.all_reduce(had, distributed.ReduceOp.MAX)
        for parameter, anywhere in zip(trained, had.tolist(), strict=True):
            if anywhere:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                distributed.all_reduce(parameter.grad)
                parameter.grad /= self._accelerator.num_processes

    @contextmanager
    def whole(self, device: torch.device) -> Iterator[bool]:
        """A context in which the task is an ordinary whole one on the main process, on a device.

        All processes enter it, and wait for the main process at its end. Changes of the task's weights inside are lost.

        Yields:
            True on the main process. The others must not touch the task.
        """
        main = self._accelerator.is_main_process
        gathered: dict[int, nn.Parameter] = {}
        for parameter in self._task.parameters():
            if isinstance(parameter, DTensor):
                full = gathered_tensor(parameter, self._device)
                if main:
                    gathered[id(parameter)] = nn.Parameter(full.to(device), parameter.requires_grad)
        if main:
            with self._as_before(), _replaced(self._task, gathered):
                yield True
        else:
            yield False
        self._accelerator.wait_for_everyone()

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Restores the modules as they were before they were sharded: their own class, without FSDP2's additions."""
        present = [(unit.module, type(unit.module), dict(vars(unit.module))) for unit in self._units]
        for module, kind, attributes, pre_hooks, hooks in self._units:
            module.__class__ = kind
            for name in vars(module).keys() - attributes:
                del vars(module)[name]  # among them FSDP2's state, which cannot be copied
            module._forward_pre_hooks, module._forward_hooks = OrderedDict(pre_hooks), OrderedDict(hooks)
        try:
            yield
        finally:
            for module, kind, added in present:
                module.__class__ = kind
                vars(module).update(added)


def _units(task: nn.Module) -> list[nn.Module]:
    """The modules that are gathered one by one: tensors go in and come out, and no other code uses their weights."""
    large: list[nn.Module] = [part for part in task.modules() if isinstance(part, TokenMLPs)]
    for part in task.modules():
        if isinstance(part, ModulationNetwork):
            large += [child for child in part.children() if isinstance(child, nn.Linear | nn.Sequential)]
    return [*transformer_layers(task), *large]


def gathered_tensor(tensor: DTensor, device: torch.device) -> Tensor:
    """All rows of a sharded tensor, on a device through which the processes communicate. All must call it."""
    rows = -(-len(tensor) // tensor.device_mesh.size())
    local = tensor.to_local().detach().to(device)
    padded = local.new_zeros(rows, *tensor.shape[1:])
    padded[: len(local)] = local
    full = local.new_empty(rows * tensor.device_mesh.size(), *tensor.shape[1:])
    distributed.all_gather(list(full.chunk(tensor.device_mesh.size())), padded)
    return full[: len(tensor)].clone(memory_format=torch.contiguous_format)


def _squares(tensors: list[Tensor]) -> Tensor:
    """The sum of all squares, in float64."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    norms = [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    return torch.stack([norm.double().square() for norm in norms]).sum()


@contextmanager
def _replaced(task: nn.Module, parameters: dict[int, nn.Parameter]) -> Iterator[None]:
    """Puts other parameters in place of those with these ids."""
    places = [
        (module._parameters, name, parameter)
        for module in task.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in parameters
    ]
    for holder, name, parameter in places:
        holder[name] = parameters[id(parameter)]
    try:
        yield
    finally:
        for holder, name, parameter in places:
            holder[name] = parameter
