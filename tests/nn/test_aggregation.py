"""The aggregation network, at once and hierarchical: equal to plain loops over documents and tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.nn import attention
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.attention import direct_attention, needed_rows
from mac_rag.nn.bank_view import BankProjection
from mac_rag.nn.hierarchical import hierarchical
from mac_rag.nn.memory_tokens import MemoryTokens
from tests.nn.helpers import network, random, random_texts


@settings(max_examples=25, deadline=None)
@given(seen=st.lists(st.booleans(), min_size=6, max_size=6).filter(any))
def test_a_hidden_document_has_no_influence(seen: list[bool]) -> None:
    built, question, phi = network(), random_texts(2), random_texts(6, seed=1)
    kept = torch.tensor(seen)
    masked, mass = built(question, built.project(phi), mask=kept.expand(2, -1), mass=True)
    removed, _ = built(question, built.project(phi[kept]))
    torch.testing.assert_close(masked, removed)
    assert mass[:, ~kept].eq(0).all()


def test_the_document_prior_moves_attention_to_the_documents_that_it_prefers() -> None:
    built, question = network(), random_texts(1)
    bank = built.project(random_texts(30, seed=1))
    scores = built.prior_scores(question, bank)[0]
    with torch.no_grad():
        for block in built.blocks:
            block.prior_scale.fill_(50.0)
    _, mass = built(question, bank, mass=True)
    assert mass.argmax() == scores.argmax()
    built.use_prior = False
    _, without = built(question, bank, mass=True)
    assert mass.max() > 0.99 > without.max()


@pytest.mark.parametrize("sharpness", [1.0, 300.0])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_what_the_prior_rules_out_is_skipped_and_missed_by_nobody(
    sharpness: float, masked: bool, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For inference; the best row of a question may stand in any chunk."""
    built, question = network(chunk_rows=7).eval(), random_texts(4)
    for block in built.blocks:
        block.prior_sharpness = sharpness
    bank = built.project(random_texts(30, seed=1))
    mask = random(4, 30, seed=2) > 0 if masked else None
    view = bank.select(torch.stack([torch.randperm(30)[:20] for _ in range(4)])) if own else bank
    mask = mask[:, :20] if mask is not None and own else mask
    asked: list[int] = []

    def counted(query: Tensor, longest: Tensor, tokens: int, bias: Tensor, floor: Tensor) -> Tensor:
        needed = needed_rows(query, longest, tokens, bias, floor)
        asked.append(int(needed.sum()))
        return needed

    monkeypatch.setattr(attention, "needed_rows", counted)
    with torch.no_grad():
        skipping, _ = built(question, view, mask=mask)
    expected, _ = built(question, view, mask=mask, attention=direct_attention)
    torch.testing.assert_close(skipping, expected)
    seen = 4 * view.documents if mask is None else int(mask.sum())
    assert sum(asked) == 2 * seen if sharpness == 1 else 8 <= sum(asked) < seen


def test_the_prior_is_the_scaled_cosine_of_means() -> None:
    built, question, phi = network(), random_texts(2), random_texts(3, seed=1)
    prior = built.prior
    for b in range(2):
        for k in range(3):
            left, right = prior.query.weight @ question.tokens[b].mean(0), prior.key.weight @ phi.tokens[k].mean(0)
            cosine = left @ right / (left.norm() * right.norm())
            expected = prior.log_scale.exp() * cosine
            torch.testing.assert_close(built.prior_scores(question, built.project(phi))[b, k], expected)


def test_without_a_prior_there_are_no_scores() -> None:
    built = network(prior_width=0)
    with pytest.raises(ValueError, match="no document prior"):
        built.prior_scores(random_texts(1), built.project(random_texts(2)))


@settings(max_examples=40, deadline=None)
@given(
    documents=st.integers(1, 9),
    questions=st.integers(1, 3),
    prior=st.sampled_from([0, 8]),
    masked=st.booleans(),
    rows=st.sampled_from([1, 2, 100]),
)
def test_the_default_way_of_attending_is_the_direct_one(
    documents: int, questions: int, prior: int, masked: bool, rows: int
) -> None:
    built, question = network(prior), random_texts(questions)
    bank = built.project(random_texts(documents, seed=1))
    mask = None
    if masked:
        mask = random(questions, documents, seed=3) > 0
        mask[:, 0] = True
    expected = built(question, bank, mask=mask, attention=direct_attention, mass=True)
    built.chunk_rows = rows
    found = built(question, dataclasses.replace(bank, chunk_rows=rows), mask=mask, mass=True)
    for ours, direct in zip(found, expected):
        torch.testing.assert_close(ours, direct, rtol=1e-10, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), prior=st.sampled_from([0, 8]))
def test_selected_rows_are_a_bank_for_each_question(data: st.DataObject, prior: int) -> None:
    built, question, phi = network(prior), random_texts(3), random_texts(6, seed=1)
    bank = built.project(phi)
    chosen = data.draw(st.integers(1, 6))
    index = torch.tensor([data.draw(st.permutations(range(6)))[:chosen] for _ in range(3)])
    found, mass = built(question, bank.select(index), mass=True)
    assert bank.select(index).documents == chosen
    for b in range(3):
        seen = torch.zeros(1, 6, dtype=torch.bool).index_fill_(1, index[b], True)
        expected, whole = built(question[b : b + 1], bank, mask=seen, mass=True)
        torch.testing.assert_close(found[b : b + 1], expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(mass[b : b + 1], whole[:, index[b]], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(mass.sum(1), torch.ones(3, dtype=torch.float64))


def test_a_bank_without_prior_keys_is_refused_while_the_prior_is_in_use() -> None:
    built, question = network(), random_texts(1)
    bank = built.project(random_texts(2, seed=1))
    bare = BankProjection(bank.keys, bank.values, None)
    with pytest.raises(ValueError, match="no prior keys"):
        built(question, bare)
    scores = built.prior_scores(question, bank)
    torch.testing.assert_close(built(question, bare, scores=scores)[0], built(question, bank)[0])
    built.use_prior = False
    built(question, bare)


def test_the_prior_is_sharper_where_banks_are_large_than_in_training() -> None:
    sharp, plain = network(prior_sharpness=3.0), network()
    question, phi = random_texts(2), random_texts(5, seed=1)
    torch.testing.assert_close(sharp.train()(question, sharp.project(phi))[0], plain(question, plain.project(phi))[0])
    with torch.no_grad():
        for block in plain.blocks:
            block.prior_scale.mul_(3.0)
    torch.testing.assert_close(sharp.eval()(question, sharp.project(phi))[0], plain(question, plain.project(phi))[0])


CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def literal(built: AggregationNetwork, question: MemoryTokens, bank: MemoryTokens, subgroup: int) -> Tensor:
    """Algorithm 3 for one question: the loop of the paper over a bank."""
    phi = bank.tokens
    scores = torch.zeros(len(phi), dtype=phi.dtype)
    if built.prior is not None and built.use_prior:
        scores = built.prior_scores(question, built.project(bank))[0]
    first = True
    while first or len(phi) > 1:
        first = False
        new, new_scores = [], []
        for start in range(0, len(phi), subgroup):
            group = slice(start, start + subgroup)
            projected = built.project(MemoryTokens(phi[group]))
            new.append(built(question, projected, scores=scores[group][None], attention=direct_attention)[0][0])
            new_scores.append(scores[group].logsumexp(0))
        phi, scores = torch.stack(new), torch.stack(new_scores)
    return phi[0]


@settings(max_examples=60, deadline=None)
@given(
    documents=st.integers(1, 30),
    questions=st.integers(1, 3),
    subgroup=st.integers(2, 9),
    prior=st.sampled_from(["none", "used", "left out"]),
    numbers=st.sampled_from([1, 3000, 1 << 24]),
    rows=st.sampled_from([1, 5, 100]),
    selected=st.sampled_from(["all", "the same", "each its own"]),
)
def test_hierarchical_aggregation_is_the_loop_of_algorithm_3(
    documents: int, questions: int, subgroup: int, prior: str, numbers: int, rows: int, selected: str
) -> None:
    built = network(0 if prior == "none" else 8, chunk_rows=rows)
    built.use_prior = prior == "used"
    question, phi = random_texts(questions), random_texts(documents, seed=1)
    bank, banks = built.project(phi), [phi] * questions
    if selected != "all":
        runs = questions if selected == "each its own" else 1
        index = torch.stack([torch.randperm(documents)[: 1 + documents // 2] for _ in range(runs)])
        bank, banks = bank.select(index), [phi[order] for order in index.expand(questions, -1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention._LOGITS, "cpu", numbers)
        found = hierarchical(built, question, bank, subgroup, budget=numbers)
    for b in range(questions):
        expected = literal(built, question[b : b + 1], banks[b], subgroup)
        torch.testing.assert_close(found[b], expected, **CLOSE)
