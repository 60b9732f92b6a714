"""A cache of rows against computing them anew."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.bank.projection import RowCache


def computed(row_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `[2, n, 3, 1]` that tell whose they are."""
    keys = row_keys.double()[None, :, None, None].expand(2, -1, 3, 1)
    return keys, -keys


@given(
    capacity=st.integers(0, 6),
    calls=st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True),
            st.lists(st.integers(0, 9), max_size=4, unique=True),
        ),
        max_size=12,
    ),
)
def test_it_gives_what_was_asked_for_and_computes_only_what_it_does_not_have(
    capacity: int, calls: list[tuple[list[int], list[int]]]
) -> None:
    cache = RowCache(capacity)
    recent: list[int] = []  # the last one is the last used
    for names, dropped in calls:
        asked: list[int] = []

        def project(places: Tensor, names: list[int] = names, asked: list[int] = asked) -> tuple[Tensor, Tensor]:
            asked += [names[place] for place in places.tolist()]
            return computed(torch.tensor(names)[places])

        found = cache.look_up(torch.tensor(names), project)
        assert all(torch.equal(a, b) for a, b in zip(found, computed(torch.tensor(names)), strict=True))
        if len(names) > capacity:
            assert asked == names
            continue
        assert asked == [name for name in names if name not in recent]
        known = [name for name in names if name in recent]
        recent = ([name for name in recent if name not in names] + known + asked)[-capacity:]
        assert len(cache._slots) == len(recent)
        cache.drop(torch.tensor(dropped, dtype=torch.long))
        recent = [name for name in recent if name not in dropped]
        assert len(cache._slots) == len(recent)


def test_rows_that_come_and_go_take_no_more_memory_than_those_that_are_there() -> None:
    cache = RowCache(1_000)
    for first in range(200):  # five at a time
        names = torch.arange(first, first + 5)
        cache.look_up(names, lambda places, names=names: computed(names[places]))
        cache.drop(torch.tensor([first]))
    assert set(cache._slots.values()) | set(cache._emptied) == set(range(5))
