"""A cache that grows in place holds what transformers' own holds."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from mac_rag.lm.base_lm import GrowingLayer, growing


def states(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = torch.randn(2, rows, 2, length, 4).unbind()
    return keys, values


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("update"), st.integers(1, 40)),
            st.tuples(st.just("reorder"), st.lists(st.integers(0, 1), min_size=2, max_size=5)),
            st.tuples(st.just("crop"), st.integers(-3, -1)),
        ),
        max_size=8,
    )
)
def test_it_is_transformers_cache_whatever_happens_to_it(steps: list[tuple[str, int | list[int]]]) -> None:
    prefix = states(2, 5)
    plain, ours = DynamicCache([prefix]), growing(DynamicCache([prefix]))
    assert isinstance(ours.layers[0], GrowingLayer)
    for name, value in [*steps, ("update", 1)]:
        if name == "update":
            new = states(len(plain.layers[0].keys), int(value))  # type: ignore[arg-type]
            expected, found = plain.update(*new, 0), ours.update(*new, 0)
        else:
            for cache in (plain, ours):
                getattr(cache, "reorder_cache" if name == "reorder" else "crop")(
                    torch.tensor(value) if name == "reorder" else value
                )
            expected, found = ((cache.layers[0].keys, cache.layers[0].values) for cache in (plain, ours))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        assert ours.get_seq_length() == plain.get_seq_length()


def test_a_token_is_written_behind_the_others_in_place() -> None:
    layer = GrowingLayer(*states(2, 100))
    first, _ = layer.update(*states(2, 1))
    second, _ = layer.update(*states(2, 1))
    assert second.data_ptr() == first.data_ptr()
    assert torch.equal(second[:, :, :101], first)


def test_other_kinds_of_layers_stay() -> None:
    cache = DynamicCache()
    cache.layers.append(DynamicSlidingWindowLayer(sliding_window=4))
    assert type(growing(cache).layers[0]) is DynamicSlidingWindowLayer
