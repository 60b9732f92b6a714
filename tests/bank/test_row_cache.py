"""A cache of rows against computing them anew."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.bank.projection import Projected, RowCache

ROWS = 6


class Rows:
    """Rows with names, which are computed for a cache of theirs."""

    def __init__(self, count: int, capacity: int) -> None:
        self.names, self.asked = torch.arange(count), list[int]()
        self.cache = RowCache()
        self.cache.follow(torch.empty(0, dtype=torch.bool), count, capacity)

    def project(self, index: Tensor) -> Projected:
        """Keys and values `[2, n, 3, 1]` that tell whose they are, and of which of two blocks."""
        self.asked += self.names[index].tolist()
        keys = self.names[index].double()[None, :, None, None].expand(2, -1, 3, 1)
        return [(keys, -keys), (keys + 0.5, -keys - 0.5)]

    def replace(self, gone: Tensor) -> None:
        """As many new rows come as old ones go."""
        remains = ~torch.isin(self.names, gone)
        first = int(self.names.max()) + 1
        self.names = torch.cat([self.names[remains], torch.arange(first, first + int((~remains).sum()))])
        self.cache.follow(remains, len(self.names), self.cache.capacity)

    @property
    def kept(self) -> set[int]:
        return set(self.names[self.cache._slots >= 0].tolist())


@settings(deadline=None)
@given(
    capacity=st.integers(1, ROWS),
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True),
            st.lists(st.integers(0, ROWS - 1), max_size=4, unique=True),
            st.booleans(),
        ),
        max_size=8,
    ),
)
def test_it_gives_what_was_asked_for_and_computes_only_what_it_does_not_have(
    capacity: int, steps: list[tuple[list[int], list[int], bool]]
) -> None:
    rows, used = Rows(ROWS, capacity), dict[int, int]()
    for step, (index, gone, all_rows) in enumerate(steps):
        is_whole = all_rows and capacity == ROWS
        wanted = torch.arange(ROWS) if is_whole else torch.tensor(index[:capacity])
        names, before = rows.names[wanted].tolist(), rows.kept
        for block in range(2):
            expected = rows.project(wanted)[block]
            rows.asked.clear()
            if is_whole:
                found = rows.cache.whole(block, 3, rows.project)
            else:
                found = rows.cache.rows(block, wanted, rows.project)
                used |= dict.fromkeys(names, step)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            assert set(rows.asked) == (set() if block else set(names) - before)
            assert len(rows.asked) == len(set(rows.asked))
        kept = rows.kept
        assert len(kept) == min(capacity, len(before | set(names)))
        assert all(used[one] <= used[other] for one in before - kept for other in kept)
        rows.replace(rows.names[torch.tensor(gone, dtype=torch.long)])
        assert rows.kept == kept & set(rows.names.tolist())


def test_rows_that_come_and_go_take_no_more_memory_than_those_that_are_there() -> None:
    rows = Rows(5, 1_000)
    for number in range(200):
        rows.cache.rows(0, torch.arange(5), rows.project)
        rows.replace(torch.tensor([number]))
    assert len(rows.cache._rows) == 5
