"""Measurement of time and memory, for comparisons of two implementations."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_LONG_SECONDS = 10.0  # a longer run is not repeated only to measure its time


@dataclass(frozen=True)
class Usage:
    """Time of a run in seconds, and its peak memory in bytes beyond the memory in use before."""

    seconds: float
    extra_bytes: int


def medians(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Median seconds of two functions, timed in turns after one warm-up each, so that a slow phase affects both."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for seconds, run in zip(times, (ours, theirs), strict=True):
            elapsed, _ = timed(run)
            if turn > 0:
                seconds.append(elapsed)
    return statistics.median(times[0]), statistics.median(times[1])


def least(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Least seconds of each function, timed in turns after one warm-up: other work on the machine only adds to them."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, run in ways.items():
            seconds[name].append(timed(run)[0])
    return {name: min(own[1:]) for name, own in seconds.items()}


def usage(run: Callable[[], _Result], device: torch.device, rounds: int) -> tuple[Usage, _Result]:
    """The memory of a function's first call and the median time of further calls, and the result of the first call.

    If the first call takes longer than 10 seconds, its time counts, and there is no further call. On a GPU the peak is
    that of torch's allocator. On a CPU it is the peak of the whole process, so call this in a new process (`in_child`).
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else memory("VmRSS")
    first, result = timed(run)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else memory("VmHWM")
    seconds = first if first > _LONG_SECONDS else statistics.median(timed(run)[0] for _ in range(rounds))
    return Usage(seconds, peak - before), result


def in_child(function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
    """Calls a function in a new process, whose memory peak no earlier work has raised."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


def timed(run: Callable[[], _Result]) -> tuple[float, _Result]:
    """Seconds of one call of a function, and its result."""
    began = time.perf_counter()
    result = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began, result


def memory(field: str) -> int:
    """Memory of this process in bytes: `VmRSS` now, `VmHWM` at the peak; without /proc always the peak.

    On Linux a child process inherits the `ru_maxrss` of its parent, so it cannot be used there.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines[field].split()[0]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
