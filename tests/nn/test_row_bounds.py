"""Rows that are left out of a question: all together they weigh less than a rounding, whatever their keys are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.nn.attention import longest_keys, needed_of_all

ROUNDING = torch.finfo(torch.float32).eps


@settings(deadline=None)
@given(
    rows=st.integers(1, 60),
    questions=st.integers(1, 3),
    sharpness=st.sampled_from([0.0, 5.0, 40.0, 200.0]),
    size=st.sampled_from([0.1, 1.0, 4.0]),
    hidden=st.booleans(),
    seed=st.integers(0, 999),
)
def test_what_is_left_out_weighs_nothing(
    rows: int, questions: int, sharpness: float, size: float, hidden: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads, queries, tokens, width = 2, 3, 4, 5

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    query, keys = size * random(questions, heads, queries, width), size * random(heads, rows, tokens, width)
    scores, weights = sharpness * random(questions, rows), torch.rand(heads, generator=generator) + 0.5
    if hidden and rows > 1:
        scores[:, 1::2] = -torch.inf
    # As attention has it: the best row's own logits are a lower bound of the largest logit.
    best = scores.argmax(1)
    logits = torch.einsum("bhsd,hktd->bhskt", query.double(), keys.double())
    logits = logits + (weights[:, None] * scores[:, None])[:, :, None, :, None]
    floor = logits[torch.arange(questions), :, :, best].amax(-1)
    needed = needed_of_all(query, longest_keys(keys), tokens, scores, weights, floor.float())
    assert needed.tolist() == sorted(set(needed.tolist()))
    assert set(best.tolist()) <= set(needed.tolist())
    left_out = torch.ones(rows, dtype=torch.bool)
    left_out[needed] = False
    share = logits.flatten(-2).softmax(-1).view_as(logits)[..., left_out, :].sum((-1, -2))
    assert float(share.max()) <= 2.5 * ROUNDING


def test_a_row_far_below_is_left_out_and_many_of_them_are_not() -> None:
    """A row may weigh nothing by itself, and a thousand like it something."""
    query, longest, floor = torch.zeros(1, 1, 1, 2), torch.zeros(1, 10_000), torch.zeros(1, 1, 1)

    def needed(light: int) -> int:
        scores = torch.full((1, 10_000), -torch.inf)
        scores[0, 0], scores[0, 1 : light + 1] = 0.0, math.log(ROUNDING) - 1
        return len(needed_of_all(query, longest, 1, scores, torch.ones(1), floor))

    assert needed(1) == 1
    assert needed(3000) == pytest.approx(2999, abs=2)
