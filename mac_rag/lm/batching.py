"""Groups texts into batches of similar length, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Sequence


def similar_lengths(lengths: Sequence[int], ratio: float) -> list[list[int]]:
    """Groups indices so that the longest text of a group is at most `ratio` times as long as its shortest.

    Every index is in exactly one group. Groups and their members ascend in length.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or lengths[index] > ratio * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(index)
    return groups


def length_buckets(lengths: Sequence[int], budget: float) -> list[list[int]]:
    """Groups indices of texts of similar length so that each padded group stays within a budget of tokens.

    Every index is in exactly one group. A text longer than the budget is a group of its own.
    """
    buckets: list[list[int]] = []
    current: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        # Lengths ascend, so the last one is the longest of its group.
        if current and (len(current) + 1) * lengths[index] > budget:
            buckets.append(current)
            current = []
        current.append(index)
    return [*buckets, current] if current else buckets
