"""The peak memory of a call, to the byte."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch

_Result = TypeVar("_Result")


def allocated_peak(run: Callable[[], _Result], device: torch.device) -> tuple[_Result, int]:
    """Calls a function; returns its result and the peak bytes of its tensors, beyond what was allocated before.

    On a CPU the peak comes from all allocations and releases of PyTorch's allocator, in the order in which
    torch.profiler records them. It includes the scratch memory of PyTorch's kernels, but not that of libraries below
    PyTorch (the packed matrices of a BLAS). On a GPU it is the growth of `torch.cuda.max_memory_allocated`.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = run()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler announces each start and stop on standard error
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
