"""The rows with the highest document prior, against all scores sorted."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from mac_rag.bank.prior_index import PriorIndex
from mac_rag.errors import BankError

WIDTH = 16


def unit(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return functional.normalize(torch.randn(rows, WIDTH, generator=generator, dtype=dtype), dim=-1)


def oracle(queries: Tensor, keys: Tensor, scale: float, n: int) -> tuple[list[set[int]], Tensor]:
    """The best rows of each question from a sorted list, and the softmax mass of all others, in double precision."""
    scores = scale * (queries.double() @ keys.double().T)
    best = [sorted(range(len(keys)), key=row.__getitem__)[-n:] for row in scores.tolist()]
    weights = scores.softmax(-1)
    return [set(rows) for rows in best], torch.stack([1 - w[rows].sum() for w, rows in zip(weights, best)])


def followed(index: PriorIndex, keys: Tensor) -> PriorIndex:
    index.refresh(torch.arange(len(keys)), keys)
    return index


def recall(found: Tensor, expected: list[set[int]]) -> float:
    hits = sum(len(set(row) & best) for row, best in zip(found.tolist(), expected))
    return hits / sum(map(len, expected))


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 60), n=st.integers(1, 70), questions=st.integers(1, 5), scale=st.floats(0.1, 30))
def test_the_exact_product_is_all_scores_sorted(rows: int, n: int, questions: int, scale: float) -> None:
    keys, queries = unit(rows, 1, torch.float64), unit(questions, 2, torch.float64)
    index, discarded = followed(PriorIndex(), keys).search(queries, scale, n)
    best, mass = oracle(queries, keys, scale, n)
    assert index.shape == (questions, min(n, rows))
    assert [set(row) for row in index.tolist()] == best
    torch.testing.assert_close(discarded, mass, atol=1e-12, rtol=1e-9)


def test_as_many_as_there_are_is_every_row_in_order() -> None:
    index, discarded = followed(PriorIndex(), unit(9)).search(unit(3, 1), 5.0, 9)
    assert index.tolist() == [list(range(9))] * 3
    torch.testing.assert_close(discarded, torch.zeros(3), atol=1e-6, rtol=0)


def test_all_cells_of_faiss_find_what_the_exact_product_finds() -> None:
    keys, queries = unit(3000), unit(8, 1)
    index, bound = followed(PriorIndex(exact_rows=100, probed=1.0), keys).search(queries, 10.0, 20)
    best, mass = oracle(queries, keys, 10.0, 20)
    assert recall(index, best) == 1
    assert (bound.double() >= mass - 1e-6).all()
    assert (bound < 1).all()


def test_some_cells_of_faiss_find_most() -> None:
    """Random vectors have no clusters to be found in: the worst case."""
    keys, queries = unit(20_000), unit(16, 1)
    index, bound = followed(PriorIndex(exact_rows=100), keys).search(queries, 10.0, 32)
    best, mass = oracle(queries, keys, 10.0, 32)
    assert recall(index, best) > 0.95
    assert (bound.double() >= mass).all()
    assert (index.diff(dim=1) > 0).all()


def test_more_than_the_searched_cells_hold_are_found_all_the_same() -> None:
    index, discarded = followed(PriorIndex(exact_rows=10, probed=0.01), unit(500)).search(unit(4, 1), 10.0, 500)
    assert index.tolist() == [list(range(500))] * 4
    torch.testing.assert_close(discarded, torch.zeros(4), atol=1e-6, rtol=0)


@settings(max_examples=15, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=5), seed=st.integers(0, 9))
def test_rows_that_come_and_go(steps: list[tuple[int, int]], seed: int) -> None:
    """Whatever was added and removed, a search is one among the rows that are left: across the exact size as well."""
    index = PriorIndex(exact_rows=150, probed=1.0)
    generator = torch.Generator().manual_seed(seed)
    row_keys, keys, following = torch.arange(200), unit(200, seed), 200
    index.refresh(row_keys, keys)
    for number, (added, removed) in enumerate(steps):
        stay = torch.randperm(len(row_keys), generator=generator)[removed:].sort().values
        row_keys = torch.cat([row_keys[stay], torch.arange(following, following + added)])
        keys = torch.cat([keys[stay], unit(added, seed + 100 * (number + 1))])
        following += added
        index.refresh(row_keys, keys)
    assert len(index) == len(keys)
    if len(keys):
        queries = unit(3, seed + 50)
        found, _ = index.search(queries, 10.0, 7)
        assert recall(found, oracle(queries, keys, 10.0, 7)[0]) == 1


def test_cells_are_made_anew_for_a_bank_that_has_grown() -> None:
    """The first ten rows say nothing of where thousands will lie; recall must not depend on them."""
    index = PriorIndex(exact_rows=5)
    near = functional.normalize(unit(10) + 20 * unit(1, 3), dim=-1)
    index.refresh(torch.arange(10), near)
    keys = torch.cat([near, unit(20_000, 1)])
    index.refresh(torch.arange(len(keys)), keys)
    queries = unit(16, 2)
    found, _ = index.search(queries, 10.0, 32)
    assert recall(found, oracle(queries, keys, 10.0, 32)[0]) > 0.95


def test_the_discarded_share_says_when_nothing_stands_out() -> None:
    """Equal priors: what is discarded is the share of the rows that are."""
    keys = unit(1).expand(50, -1)
    for index in (PriorIndex(), PriorIndex(exact_rows=10)):
        _, discarded = followed(index, keys).search(unit(2, 1), 3.0, 10)
        torch.testing.assert_close(discarded, torch.full((2,), 0.8))
    _, discarded = followed(PriorIndex(), unit(50)).search(unit(2, 1), math.exp(8), 1)
    torch.testing.assert_close(discarded, torch.zeros(2))


def test_without_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(BankError, match=r"20 rows.*mac-rag\[faiss\]"):
        followed(PriorIndex(exact_rows=10), unit(20))
