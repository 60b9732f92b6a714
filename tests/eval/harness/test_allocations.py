"""The peak memory of a call: the tensors that it holds at once, beyond those that were there before."""

from __future__ import annotations

import torch
from torch import Tensor

from eval.harness.allocations import allocated_peak

CPU = torch.device("cpu")


def test_the_peak_counts_tensors_that_are_held_at_once() -> None:
    held = torch.ones(1000)

    def work() -> Tensor:
        first = torch.ones(50_000)
        second = first + 1  # 400 kB with the first
        del first
        third = torch.ones(20_000)  # 280 kB with the second
        return second.sum() + third.sum() + held.sum()

    result, peak = allocated_peak(work, CPU)
    assert result == 100_000 + 20_000 + 1000
    assert 400_000 <= peak < 410_000


def test_memory_allocated_before_does_not_count() -> None:
    before = [torch.ones(100_000)]

    def work() -> None:
        before.clear()
        torch.ones(150_000)

    assert 200_000 <= allocated_peak(work, CPU)[1] <= 600_000
