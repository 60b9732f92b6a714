"""Padding of token rows."""

from __future__ import annotations

from typing import Any

import pytest

from mac_rag.lm.batching import pad_rows


@pytest.mark.parametrize(
    ("rows", "options", "ids", "mask"),
    [
        ([[7, 8, 9], [5]], {"pad": 1}, [[7, 8, 9], [5, 1, 1]], [[1, 1, 1], [1, 0, 0]]),
        ([[7, 8, 9], [5]], {"pad": 1, "side": "left"}, [[7, 8, 9], [1, 1, 5]], [[1, 1, 1], [0, 0, 1]]),
        ([[0, 3], [0]], {"pad": 0}, [[0, 3], [0, 0]], [[1, 1], [1, 0]]),  # a token that equals the padding
        ([[4, 6], []], {"pad": 2, "side": "left"}, [[4, 6], [2, 2]], [[1, 1], [0, 0]]),
        ([[4, 6], []], {"pad": 2}, [[4, 6], [2, 2]], [[1, 1], [0, 0]]),
        ([[1, 2], [3, 4]], {"pad": 0, "device": "cpu", "side": "left"}, [[1, 2], [3, 4]], [[1, 1], [1, 1]]),
    ],
)
def test_rows_are_filled_on_one_side_and_masked(rows: Any, options: Any, ids: Any, mask: Any) -> None:
    found = pad_rows(rows, **options)
    assert [part.tolist() for part in found] == [ids, mask]
    assert found[0].dtype == found[1].dtype
