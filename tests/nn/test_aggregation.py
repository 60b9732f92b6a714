"""The aggregation network: a set operation on the bank, equal to a plain loop over documents and tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.nn.aggregation import AggregationNetwork

WIDTH, TOKENS = 16, 3


def network(prior_width: int = 8) -> AggregationNetwork:
    torch.manual_seed(0)
    built = AggregationNetwork(WIDTH, blocks=2, heads=2, head_width=8, prior_width=prior_width).double()
    for block in built.blocks:
        if block.prior_scale is not None:
            torch.nn.init.uniform_(block.prior_scale, 0.5, 1.5)
    return built


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(7)), prior=st.sampled_from([0, 8]))
def test_the_order_of_documents_does_not_matter(order: list[int], prior: int) -> None:
    built, question, phi = network(prior), random(3, TOKENS, WIDTH), random(7, TOKENS, WIDTH, seed=1)
    before, mass_before = built(question, built.project(phi), mass=True)
    after, mass_after = built(question, built.project(phi[order]), mass=True)
    torch.testing.assert_close(before, after)
    torch.testing.assert_close(mass_before[:, order], mass_after)


@settings(max_examples=25, deadline=None)
@given(seen=st.lists(st.booleans(), min_size=6, max_size=6).filter(any))
def test_a_hidden_document_has_no_influence(seen: list[bool]) -> None:
    built, question, phi = network(), random(2, TOKENS, WIDTH), random(6, TOKENS, WIDTH, seed=1)
    kept = torch.tensor(seen)
    masked, mass = built(question, built.project(phi), mask=kept.expand(2, -1), mass=True)
    removed, _ = built(question, built.project(phi[kept]))
    torch.testing.assert_close(masked, removed)
    assert mass[:, ~kept].eq(0).all()


def test_each_question_of_a_batch_is_answered_for_itself() -> None:
    built, question = network(), random(4, TOKENS, WIDTH)
    bank = built.project(random(5, TOKENS, WIDTH, seed=1))
    whole, mass = built(question, bank, mass=True)
    for i in range(4):
        one, one_mass = built(question[i : i + 1], bank, mass=True)
        torch.testing.assert_close(whole[i : i + 1], one)
        torch.testing.assert_close(mass[i : i + 1], one_mass)
    torch.testing.assert_close(mass.sum(1), torch.ones(4, dtype=torch.float64))


def test_the_document_prior_moves_attention_to_the_documents_that_it_prefers() -> None:
    built, question = network(), random(1, TOKENS, WIDTH)
    bank = built.project(random(30, TOKENS, WIDTH, seed=1))
    scores = built.prior_scores(question, bank)[0]
    with torch.no_grad():
        for block in built.blocks:
            block.prior_scale.fill_(50.0)
    _, mass = built(question, bank, mass=True)
    assert mass.argmax() == scores.argmax()
    built.use_prior = False
    _, without = built(question, bank, mass=True)
    assert mass.max() > 0.99 > without.max()


def test_the_prior_is_the_scaled_cosine_of_means() -> None:
    built, question, phi = network(), random(2, TOKENS, WIDTH), random(3, TOKENS, WIDTH, seed=1)
    prior = built.prior
    assert prior is not None
    for b in range(2):
        for k in range(3):
            left, right = prior.query.weight @ question[b].mean(0), prior.key.weight @ phi[k].mean(0)
            cosine = left @ right / (left.norm() * right.norm())
            expected = prior.log_scale.exp() * cosine
            torch.testing.assert_close(built.prior_scores(question, built.project(phi))[b, k], expected)


def test_without_a_prior_there_are_no_scores() -> None:
    built = network(prior_width=0)
    with pytest.raises(ValueError, match="no document prior"):
        built.prior_scores(random(1, TOKENS, WIDTH), built.project(random(2, TOKENS, WIDTH)))
