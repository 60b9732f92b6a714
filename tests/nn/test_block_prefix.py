"""Attention to a prefix of keys and values by products of matrices, against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mac_rag.nn.block_prefix import BlockPrefix, grouped_attention
from mac_rag.nn.modulation import PrefixModulation
from mac_rag.nn.rows_prefix import RowsPrefix


def inputs(
    seed: int, batch: int, kv_heads: int, groups: int, length: int, kept: int, dtype: torch.dtype
) -> tuple[Any, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(batch, heads, count, 8, generator=generator).to(dtype)
        for heads, count in ((kv_heads * groups, length), (kv_heads, kept), (kv_heads, kept))
    )
    mask = torch.randn(batch, 1, length, kept, generator=generator)
    mask = mask.masked_fill(torch.rand(mask.shape, generator=generator) < 0.3, torch.finfo(dtype).min)
    mask[..., 0] = 0.0
    return SimpleNamespace(num_key_value_groups=groups), query, key, value, mask.to(dtype)


def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """One head of one row at a time, in float64."""
    groups = query.shape[1] // key.shape[1]
    out = torch.zeros(len(query), query.shape[2], query.shape[1], value.shape[3], dtype=torch.float64)
    for row in range(len(query)):
        for head in range(query.shape[1]):
            keys, values = key[row, head // groups].double(), value[row, head // groups].double()
            logits = query[row, head].double() @ keys.T * scaling + mask[row, 0].double()
            out[row, :, head] = logits.softmax(-1) @ values
    return out


@given(
    seed=st.integers(0, 1000), batch=st.integers(1, 3), kv_heads=st.integers(1, 3), groups=st.integers(1, 4),
    length=st.sampled_from([1, 1, 3, 5, 40]), kept=st.integers(1, 20), scaling=st.sampled_from([None, 0.25, 1.0]),
    kind=st.sampled_from(["float", "boolean", "none"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_it_is_attention(
    seed: int, batch: int, kv_heads: int, groups: int, length: int, kept: int, scaling: float | None, kind: str
) -> None:
    for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        module, *parts, mask = inputs(seed, batch, kv_heads, groups, length, kept, dtype)
        given_mask: Tensor | None = mask
        if kind == "none":
            assume(length == 1)
            given_mask, mask = None, torch.zeros_like(mask)
        elif kind == "boolean":
            given_mask = mask > torch.finfo(dtype).min
            mask = torch.zeros_like(mask).masked_fill(~given_mask, torch.finfo(dtype).min)
        with torch.no_grad():
            out, _ = grouped_attention(module, *parts, given_mask, scaling=scaling)
        expected = plain(*parts, mask, 8**-0.5 if scaling is None else scaling)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, rtol=error, atol=error)


@pytest.mark.parametrize("change", ["no mask", "position bias"])
def test_anything_else_is_left_to_pytorch(change: str) -> None:
    module, *parts, mask = inputs(0, 2, 2, 2, 3, 7, torch.float32)
    given_mask = None if change == "no mask" else mask
    options = {"position_bias": torch.randn(1, 1, 3, 7)} if change == "position bias" else {}
    with torch.no_grad():
        out, _ = grouped_attention(module, *parts, given_mask, **options)
        expected, _ = sdpa_attention_forward(module, *parts, given_mask, **options)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", [BlockPrefix, RowsPrefix])
@pytest.mark.parametrize("kept", [[0, 1], [1], [2, 0]])
def test_prefixes_behind_each_other_are_those_of_all_their_rows(kind: type[BlockPrefix], kept: list[int]) -> None:
    """What is left of one is as long as its longest row needs."""
    opening = torch.randn(2, 2, 1, 3, 4)
    lengths, bias = [[5, 2], [1], [], [4, 1, 2]], [[0.0, -1.0], [-0.5], [], [0.0, -2.0, -3.0]]
    documents = [[torch.randn(2, 2, 1, length, 4) for length in row] for row in lengths]

    def of(rows: list[int]) -> BlockPrefix:
        return kind(opening, [documents[row] for row in rows], [bias[row] for row in rows])

    first, last = of([0, 1, 2]).after_cache(torch.tensor(kept)), of([3]).after_cache(torch.tensor([0]))
    found, expected = first.followed_by(last), of([*kept, 3])
    assert type(found) is kind
    assert found.prefix_length == expected.prefix_length
    for name, value in vars(expected).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(found, name), value), name
        elif isinstance(value, list):
            for row, same in zip(getattr(found, name), value, strict=True):
                assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(row, same, strict=True))
    assert of([0]).followed_by(PrefixModulation(torch.randn(1, 2, 2, 1, 3, 4))) is None
