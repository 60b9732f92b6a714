"""Options of several numbers: what they accept and refuse."""

from __future__ import annotations

import pytest

from eval.harness.command import whole_numbers
from mac_rag.errors import ConfigError


@pytest.mark.parametrize("text", ["", "32,", "many", "3.5"])
def test_sizes_must_be_whole_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="whole numbers"):
        whole_numbers("--sizes", text)


def test_sizes_are_sorted_and_at_least_one() -> None:
    assert whole_numbers("--sizes", "256, 32,32") == [32, 256]
    with pytest.raises(ConfigError, match="at least 1, got '0,5'"):
        whole_numbers("--sizes", "0,5")
