"""Groups rows of similar length into batches with little padding, and pads them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch import Tensor

_one_group: ContextVar[bool] = ContextVar("one_group", default=False)


@contextmanager
def one_group() -> Iterator[None]:
    """A context in which rows of all lengths share one group.

    Processes that train one sharded model must call its layers equally often, whatever the lengths of their rows.
    """
    before = _one_group.set(True)
    try:
        yield
    finally:
        _one_group.reset(before)


def pad_rows(
    rows: Sequence[Sequence[int]],
    pad: int,
    device: torch.device | str | None = None,
    side: Literal["left", "right"] = "right",
) -> tuple[Tensor, Tensor]:
    """Pads rows of token ids to the longest of them.

    Args:
        rows: B rows of token ids, at least one.
        pad: the id that fills the padding.
        device: device of both tensors; None for torch's default.
        side: where the padding goes.

    Returns:
        Token ids `[B, L]` and mask `[B, L]`, both int64; the mask is 1 for tokens and 0 for padding.

    Examples:
        >>> ids, mask = pad_rows([[7, 8, 9], [5]], pad=0)
        >>> ids.tolist(), mask.tolist()
        ([[7, 8, 9], [5, 0, 0]], [[1, 1, 1], [1, 0, 0]])
    """
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), pad)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(length - len(row), length)
        ids[index, place] = torch.tensor(row, dtype=torch.int64)
        mask[index, place] = 1
    return ids.to(device), mask.to(device)


def similar_lengths(lengths: Sequence[int], ratio: float) -> list[list[int]]:
    """Groups indices so that the longest text of a group is at most `ratio` times as long as its shortest.

    Every index is in exactly one group. Groups and their members ascend in length. Within `one_group`, there is one.
    """
    if _one_group.get():
        ratio = math.inf
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or lengths[index] > ratio * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(index)
    return groups


def length_buckets(lengths: Sequence[int], budget: float) -> list[list[int]]:
    """Groups indices of texts of similar length so that each padded group stays within a budget of tokens.

    Every index is in exactly one group. A text longer than the budget is a group of its own. Within `one_group`, there
    is one group.
    """
    if _one_group.get():
        budget = math.inf
    buckets: list[list[int]] = []
    current: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        # Lengths ascend, so the last one is the longest of its group.
        if current and (len(current) + 1) * lengths[index] > budget:
            buckets.append(current)
            current = []
        current.append(index)
    return [*buckets, current] if current else buckets
