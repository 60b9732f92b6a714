"""What a training costs, measured on its first steps: tokens, time, and memory by part."""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

_MEASURED = 3  # steps; the first is left out of the time where there are others, because it is slower


class CostMeter:
    """Measures the first steps of a training, and estimates how long the rest takes.

    Args:
        task: the task.
        accelerator: the processes.
        steps: steps of the whole training.
        first: steps that are done already.
        examples: examples of one step over all processes.

    Attributes:
        report: the figures, once they are complete; None before.
    """

    def __init__(self, task: nn.Module, accelerator: Accelerator, steps: int, first: int, examples: int) -> None:
        self._task = task
        self._accelerator = accelerator
        self._steps = steps
        self._left = min(_MEASURED, steps - first)
        self._examples = examples
        self._parts = parts_of(task)
        self._tokens = 0
        self._counted = 0
        self._seconds: list[float] = []
        self._gradients: dict[str, int] = defaultdict(int)
        self.report: dict[str, float] | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Stands around a step: counts its tokens and its time."""
        began = time.perf_counter()
        if self._left:
            with self._counting_tokens():
                yield
            self._counted += 1
        else:
            yield
        self._seconds = [*self._seconds[-99:], time.perf_counter() - began]

    def gradients(self) -> None:
        """Looks at the gradients of a step; called before they are set to zero."""
        if self._left:
            for part, parameters in self._parts.items():
                present = (p.grad for p in parameters if p.grad is not None)
                self._gradients[part] = max(self._gradients[part], bytes_of(present))

    def measured(self, optimizer: torch.optim.Optimizer) -> str:
        """Called after each step, on all processes.

        Returns:
            The figures as a text, once, after the measured steps; empty after all others, and on all processes but the
            first.
        """
        if not self._left:
            return ""
        self._left -= 1
        if self._left:
            return ""
        figures = {**self._extent(), **self._memory(optimizer)}
        everyone: list[dict[str, float]] = gather_object([figures])
        self.report = {name: max(f[name] for f in everyone) for name in figures}
        if "tokens_per_step" in figures:
            self.report["tokens_per_step"] = sum(f["tokens_per_step"] for f in everyone)
            self.report["tokens"] = self.report["tokens_per_step"] * self._steps
        return self._text(self.report) if self._accelerator.is_main_process else ""

    def seconds_per_step(self) -> float:
        """The median of the last steps, without the first."""
        return statistics.median(self._seconds[1:] or self._seconds)

    def left(self, step: int) -> str:
        """How long the steps behind this one take, as a text; without validations and checkpoints."""
        return duration((self._steps - step) * self.seconds_per_step())

    @contextmanager
    def _counting_tokens(self) -> Iterator[None]:
        """Counts the tokens, with their padding, that transformers models embed."""
        embeddings = {id(e): e for m in self._task.modules() if isinstance(m, PreTrainedModel) for e in _embeddings(m)}

        def count(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._tokens += inputs[0].numel() if inputs and isinstance(inputs[0], Tensor) else 0

        handles = [embedding.register_forward_pre_hook(count) for embedding in embeddings.values()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _extent(self) -> dict[str, float]:
        seconds = self.seconds_per_step()
        tokens = {} if not self._tokens else {"tokens_per_step": self._tokens / self._counted, "tokens": 0.0}
        return {
            "steps": self._steps,
            "examples_per_step": self._examples,
            "examples": self._examples * self._steps,
            **tokens,
            "seconds_per_step": seconds,
            "seconds": seconds * self._steps,
        }

    def _memory(self, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        state = optimizer.state
        figures: dict[str, float] = {"resident_peak_bytes": _resident_peak()}
        if self._accelerator.device.type == "cuda":
            figures["cuda_peak_bytes"] = torch.cuda.max_memory_allocated(self._accelerator.device)
        for part, parameters in self._parts.items():
            figures[f"{part}/weights_bytes"] = bytes_of(parameters)
            figures[f"{part}/gradients_bytes"] = self._gradients[part]
            kept = (value for p in parameters for value in state.get(p, {}).values() if isinstance(value, Tensor))
            figures[f"{part}/optimizer_bytes"] = bytes_of(kept)
        return figures

    def _text(self, report: Mapping[str, float]) -> str:
        of_each = ", of the largest process" if self._accelerator.num_processes > 1 else ""
        counts = [f"{self._steps:,} steps", f"{report['examples']:,.0f} examples ({self._examples:,} a step)"]
        if "tokens" in report:
            counts.append(f"about {report['tokens']:,.0f} tokens ({report['tokens_per_step']:,.0f} a step)")
        peak = [f"{size(report['resident_peak_bytes'])} resident"]
        if "cuda_peak_bytes" in report:
            peak.append(f"{size(report['cuda_peak_bytes'])} on the GPU")
        lines = [
            f"cost: {', '.join(counts)}",
            f"  time: {report['seconds_per_step']:.3g} s a step, {duration(report['seconds'])} for all steps, without "
            "validations",
            f"  memory at its peak{of_each}: {', '.join(peak)}",
        ]
        for part in self._parts:
            weights, gradients, state = (
                report[f"{part}/{kind}_bytes"] for kind in ("weights", "gradients", "optimizer")
            )
            lines.append(f"  {part}: weights {size(weights)}, gradients {size(gradients)}, optimiser {size(state)}")
        return "\n".join(lines)


def parts_of(task: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The parameters of a task by part, each once; a model of several networks has a part for each network."""
    modules: dict[str, nn.Module] = {}
    for name, child in task.named_children():
        composed = not isinstance(child, PreTrainedModel) and any(
            isinstance(m, PreTrainedModel) for m in child.modules()
        )
        modules |= dict(child.named_children()) if composed else {name: child}
    parts: dict[str, list[nn.Parameter]] = {}
    seen: set[nn.Parameter] = set()
    for name, module in [*modules.items(), ("other", task)]:
        own = [parameter for parameter in module.parameters() if parameter not in seen]
        seen.update(own)
        if own:
            parts[name] = own
    return parts


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors on this process; of sharded ones, of its part."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def duration(seconds: float) -> str:
    """A time as a text.

    Examples:
        >>> duration(42.4), duration(150), duration(5000)
        ('42 s', '2 min 30 s', '1 h 23 min')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _embeddings(model: PreTrainedModel) -> list[nn.Module]:
    """The token embeddings of a model, and not another network's that it borrows: these are counted there."""
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:  # a part of a model that has none
        return []
    return [embeddings] if isinstance(embeddings, nn.Embedding) else []


def size(count: float) -> str:
    """A number of bytes as a text.

    Examples:
        >>> size(0), size(2000), size(3 * 2**29)
        ('0 B', '1.95 KiB', '1.5 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.3g} GiB"


def _resident_peak() -> float:
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else 1024 * peak)
