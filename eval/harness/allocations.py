"""The memory that a piece of work takes, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

_Result = TypeVar("_Result")


def allocated_peak(run: Callable[[], _Result], device: torch.device) -> tuple[_Result, int]:
    """What a run returns, and the most bytes of tensors that it held at once beyond those that were there before.

    On the CPU these are all allocations and releases of PyTorch's allocator in the order in which torch.profiler
    records them, what kernels allocate for themselves included; not what libraries below PyTorch keep (the packed
    matrices of a BLAS). On a GPU it is `torch.cuda.max_memory_allocated` less what was allocated before.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = run()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    assert profiler.profiler is not None
    records = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(records, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return result, peak
