"""Hashed BM25 against a plain loop, and their products against BM25."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_rag.errors import DataError
from mac_rag.nn.lexical import HashedBM25

VOCABULARY = 300
texts = st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30), min_size=1, max_size=5)


def module(vectors: int = 2, width: int = 8, corpus: list[list[int]] | None = None) -> HashedBM25:
    lexical = HashedBM25(VOCABULARY, vectors, width)
    generator = torch.Generator().manual_seed(0)
    lexical.count(corpus or torch.randint(0, VOCABULARY, (40, 25), generator=generator).tolist())
    return lexical


def hashed(lexical: HashedBM25, rows: list[list[int]]) -> torch.Tensor:
    """`[K, R, D]`, all rows in one padded batch."""
    length = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    found: torch.Tensor = lexical(ids, mask)
    return found


def fmix32(number: int) -> int:
    """MurmurHash3's finaliser."""
    number ^= number >> 16
    number = number * 0x85EBCA6B % 2**32
    number ^= number >> 13
    number = number * 0xC2B2AE35 % 2**32
    return number ^ number >> 16


@settings(max_examples=30, deadline=None)
@given(rows=texts)
def test_it_is_what_a_plain_loop_gives(rows: list[list[int]]) -> None:
    lexical = module()
    found = hashed(lexical, rows).flatten(1).double()
    typical = float(lexical.typical_length)
    for row, vector in zip(rows, found, strict=True):
        expected = [0.0] * 16
        for token in set(row):
            count = row.count(token)
            saturated = count * 2.5 / (count + 1.5 * (0.25 + 0.75 * len(row) / typical))
            number = fmix32(token * 0x9E3779B1 % 2**32)
            sign = 1 if number % 2 else -1
            expected[number // 2 % 16] += sign * math.sqrt(float(lexical.rarity[token])) * saturated
        torch.testing.assert_close(vector, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=1e-5)


def test_rarity_is_bm25s_idf() -> None:
    lexical = module(corpus=[[1, 1, 2], [1, 3], [1, 4, 5, 6]])
    for token, held in {1: 3, 2: 1, 6: 1, 7: 0}.items():
        assert float(lexical.rarity[token]) == pytest.approx(math.log(1 + (3 - held + 0.5) / (held + 0.5)))
    assert float(lexical.typical_length) == 3.0
    with pytest.raises(DataError, match="no texts to count tokens in"):
        lexical.count([])


def test_products_are_bm25_scores_where_no_tokens_collide() -> None:
    generator = torch.Generator().manual_seed(1)
    documents = torch.randint(0, VOCABULARY, (50, 40), generator=generator).tolist()
    lexical = module(vectors=4096, width=64, corpus=documents)
    assert len(lexical.places.unique()) == VOCABULARY
    question = list(range(100, 112))  # distinct tokens, which all count alike
    products = hashed(lexical, documents).flatten(1) @ hashed(lexical, [question]).flatten()
    scores = []
    for document in documents:
        score = 0.0
        for token in question:
            holding = sum(token in other for other in documents)
            count = document.count(token)
            score += math.log(1 + (50 - holding + 0.5) / (holding + 0.5)) * count * 2.5 / (count + 1.5)
        scores.append(score)
    expected = torch.tensor(scores)
    assert len(expected[expected > 0]) > 10
    torch.testing.assert_close(products / products.norm(), expected / expected.norm(), atol=1e-5, rtol=1e-5)


def test_collisions_cancel_out_on_average() -> None:
    """Over many pairs of texts that share nothing, products are small beside those of texts that share half."""
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2)).tolist()
    lexical = module(vectors=4, width=64)
    groups = [order[start : start + 20] for start in range(0, 280, 20)]
    halves = [[*group[:10], *other[:10]] for group, other in pairwise(groups)]
    apart = hashed(lexical, groups).flatten(1)
    products = apart @ apart.T
    among = products[~torch.eye(len(groups), dtype=torch.bool)]
    shared = (apart[:-1] * hashed(lexical, halves).flatten(1)).sum(1)
    assert among.abs().mean() < 0.25 * shared.mean()
    assert among.mean().abs() < 0.1 * shared.mean()
