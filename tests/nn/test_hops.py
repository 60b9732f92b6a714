"""Hops: each slot looks for what the one before it leads to, and equals a plain loop over networks without slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional

from mac_rag.config import AggregationConfig
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.attention import direct_attention
from tests.nn.helpers import TOKENS, WIDTH, network, random_texts


def with_hops(**options: object) -> AggregationNetwork:
    """A network whose hops and marks are away from their start."""
    built = network(hops=True, **options)
    assert built.hops is not None
    assert built.slots is not None
    torch.nn.init.normal_(built.hops.to_query.weight)
    for marks in built.slots.parameters():
        torch.nn.init.normal_(marks)
    return built


def one_slot(slots: AggregationNetwork) -> AggregationNetwork:
    """The same network without slots."""
    plain = network(recency=slots.recency is not None)
    state = {name: value for name, value in slots.state_dict().items() if not name.startswith(("slots", "hops"))}
    plain.load_state_dict(state)
    return plain


@settings(max_examples=30, deadline=None)
@given(
    documents=st.integers(1, 6),
    slots=st.integers(2, 4),
    seen=st.integers(0, 2**6 - 1),
    direct=st.booleans(),
    recency=st.booleans(),
)
@torch.no_grad()
def test_slots_equal_a_plain_loop(documents: int, slots: int, seen: int, direct: bool, recency: bool) -> None:
    built, question, phi = with_hops(slots=slots, recency=recency), random_texts(3), random_texts(documents, seed=1)
    visible = torch.tensor([bool(seen >> place & 1) for place in range(documents)])
    if not visible.any():
        visible[:] = True
    bank = replace(built.project(phi), dates=torch.arange(documents) % 3)
    options = {"attention": direct_attention} if direct else {}
    got, mass = built(question, bank, mask=visible.expand(3, -1), mass=True, **options)
    assert got.shape == (3, slots * TOKENS, WIDTH)
    plain = one_slot(built)
    assert plain.prior is not None
    assert built.hops is not None
    assert built.slots is not None
    assert bank.prior_keys is not None
    assert bank.dates is not None
    weight = torch.stack([block.prior_weights for block in plain.blocks]).mean()
    for i in range(3):
        alone, mask = question[i : i + 1], visible.clone()
        own = query = plain.prior.queries(alone)
        masses, sure, scored = [], [], []
        for slot in range(slots):
            scores = plain.prior.score(query, bank.prior_keys).masked_fill(~mask, -torch.inf)
            scores = plain.with_recency(scores, bank.prior_keys, bank.dates, None)
            read, shares = plain(alone, bank, scores=scores, mask=mask[None], mass=True)
            scored.append(scores.max())
            faintness = (scored[0] - scored[slot]).clamp(0, 8)
            mark = built.slots.places[slot - 1] + faintness * built.slots.faint
            marked = read if slot == 0 else read + mark * WIDTH**0.5
            torch.testing.assert_close(got[i, slot * TOKENS : (slot + 1) * TOKENS], marked[0])
            best = scores[0].topk(min(2, documents)).values
            ahead = best[0] - best[1] if len(best) > 1 else torch.tensor(torch.inf, dtype=torch.float64)
            masses.append(shares[0])
            sure.append(functional.logsigmoid(weight * ahead))
            if int(mask.sum()) > 1:
                mask[int(scores[0].argmax())] = False
            query = built.hops(own, alone.tokens, marked)
        expected = (torch.stack(sure).softmax(0)[:, None] * torch.stack(masses)).sum(0)
        torch.testing.assert_close(mass[i], expected)
        torch.testing.assert_close(mass[i].sum(), torch.ones((), dtype=torch.float64))


@torch.no_grad()
def test_untrained_hops_rank_as_slots_do() -> None:
    hops, slots = network(slots=3, hops=True), network(slots=3)
    assert hops.slots is not None
    for marks in hops.slots.parameters():
        torch.nn.init.normal_(marks)
    slots.load_state_dict({name: value for name, value in hops.state_dict().items() if "hops" not in name})
    question, phi = random_texts(3), random_texts(6, seed=1)
    torch.testing.assert_close(hops(question, hops.project(phi))[0], slots(question, slots.project(phi))[0])


@torch.no_grad()
def test_hops_that_are_switched_off_rank_as_slots_do() -> None:
    hops, slots = with_hops(slots=3), network(slots=3)
    slots.load_state_dict({name: value for name, value in hops.state_dict().items() if "hops" not in name})
    question, phi = random_texts(3), random_texts(6, seed=1)
    assert not torch.allclose(hops(question, hops.project(phi))[0], slots(question, slots.project(phi))[0])
    hops.use_hops = False
    for found, expected in zip(
        hops(question, hops.project(phi), mass=True), slots(question, slots.project(phi), mass=True)
    ):
        torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_the_order_of_documents_does_not_matter() -> None:
    built, question, phi = with_hops(slots=3), random_texts(3), random_texts(6, seed=1)
    expected, mass = built(question, built.project(phi), mass=True)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    got, other = built(question, built.project(phi[order]), mass=True)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(other, mass[:, order])


@torch.no_grad()
def test_without_the_prior_all_slots_are_alike() -> None:
    built, question, phi = with_hops(slots=2), random_texts(3), random_texts(6, seed=1)
    built.use_prior = False
    assert built.slots is not None
    got = built(question, built.project(phi))[0].unflatten(1, (2, TOKENS))
    torch.testing.assert_close(got[:, 1] - got[:, 0], (built.slots.places[0] * WIDTH**0.5).expand(3, TOKENS, WIDTH))


def test_what_a_slot_has_read_reaches_the_next_query() -> None:
    built, question, phi = with_hops(slots=2), random_texts(3), random_texts(6, seed=1)
    aggregated = built(question, built.project(phi))[0]
    read = aggregated.unflatten(1, (2, TOKENS))[:, :-1]
    own, following = built.following_queries(question, read)
    assert not torch.allclose(own, following)
    torch.testing.assert_close(following.norm(dim=1), torch.ones(3, dtype=torch.float64))
    following.sum().backward()
    for name in ("blocks.0.to_value.weight", "hops.kinds", "prior.query.weight"):
        grad = built.get_parameter(name).grad
        assert grad is not None
        assert grad.abs().sum() > 0


def test_lexical_vectors_stay_the_questions() -> None:
    built = with_hops(slots=2)
    query: Tensor = torch.randn(3, 8 + 5, dtype=torch.float64)
    assert built.hops is not None
    moved = built.hops(query, random_texts(3).tokens, random_texts(3, seed=1).tokens)
    torch.testing.assert_close(moved[:, 8:], query[:, 8:])
    assert not torch.allclose(moved[:, :8], query[:, :8])


def test_scores_that_are_known_before_are_refused() -> None:
    built, question, phi = with_hops(slots=2), random_texts(3), random_texts(6, seed=1)
    with pytest.raises(ValueError, match="cannot be known before"):
        built(question, built.project(phi), scores=torch.zeros(3, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match="do not follow one another"):
        network(slots=2).following_queries(question, question.tokens[:, None])


def test_hops_need_several_slots() -> None:
    with pytest.raises(ValidationError, match="hops lead from slot to slot, but slots is 1"):
        AggregationConfig(prior_width=8, hops=True)
