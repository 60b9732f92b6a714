"""Padding of token rows."""

from __future__ import annotations

import pytest

from mac_rag.lm.batching import pad_rows


class TestPadRows:
    def test_fills_the_right_by_default(self) -> None:
        ids, mask = pad_rows([[7, 8, 9], [5]], pad=1)
        assert ids.tolist() == [[7, 8, 9], [5, 1, 1]]
        assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]

    def test_fills_the_left_when_told_to(self) -> None:
        ids, mask = pad_rows([[7, 8, 9], [5]], pad=1, side="left")
        assert ids.tolist() == [[7, 8, 9], [1, 1, 5]]
        assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]

    def test_masks_padding_and_not_tokens_that_equal_it(self) -> None:
        ids, mask = pad_rows([[0, 3], [0]], pad=0)
        assert ids.tolist() == [[0, 3], [0, 0]]
        assert mask.tolist() == [[1, 1], [1, 0]]

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_an_empty_row_is_all_padding(self, side: str) -> None:
        ids, mask = pad_rows([[4, 6], []], pad=2, side=side)  # type: ignore[arg-type]
        assert ids.tolist() == [[4, 6], [2, 2]]
        assert mask.tolist() == [[1, 1], [0, 0]]

    def test_rows_of_one_length_get_no_padding(self) -> None:
        ids, mask = pad_rows([[1, 2], [3, 4]], pad=0, device="cpu", side="left")
        assert ids.tolist() == [[1, 2], [3, 4]]
        assert mask.all()
        assert ids.dtype == mask.dtype
