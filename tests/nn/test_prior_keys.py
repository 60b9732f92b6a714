"""Prior keys without their zeros: the same products as with them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.nn.prior import PriorKeys


def lexical(rows: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(rows, width, generator=generator)
    return numbers * (torch.rand(rows, width, generator=generator) < torch.rand(rows, 1, generator=generator))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    width=st.sampled_from([0, 1, 7]),
    questions=st.integers(1, 3),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_products_and_choices(rows: list[int], width: int, questions: int, seed: int, data: st.DataObject) -> None:
    dense = [torch.randn(count, 3, generator=torch.Generator().manual_seed(seed + n)) for n, count in enumerate(rows)]
    words = [lexical(count, width, seed + 10 + n) for n, count in enumerate(rows)]
    plain = torch.cat([torch.cat(parts, 1) for parts in zip(dense, words)])
    keys = PriorKeys.cat([PriorKeys.of(*parts) for parts in zip(dense, words)])
    queries = torch.cat([torch.randn(questions, 3), lexical(questions, width, seed + 20)], 1)
    torch.testing.assert_close(keys.products(queries), queries @ plain.T)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(plain), max_size=len(plain))), dtype=torch.bool)
    kept = keys.kept(mask)
    assert len(kept) == int(mask.sum())
    torch.testing.assert_close(kept.products(queries), queries @ plain[mask].T)
    if len(plain):
        index = torch.tensor(data.draw(st.lists(st.integers(0, len(plain) - 1), max_size=5)), dtype=torch.long)
        assert torch.equal(keys.take(index), plain[index])


def test_the_zeros_take_no_memory() -> None:
    words = torch.zeros(100, 3072)
    words[:, :80] = 1.0
    keys = PriorKeys.of(torch.zeros(100, 384), words)
    assert keys.nbytes == 100 * (384 * 4 + 4 + 80 * 8)
