"""Hierarchical aggregation: Algorithm 3 of the paper, written out as a loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.errors import ConfigError
from mac_rag.nn import attention
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.attention import direct_attention
from mac_rag.nn.hierarchical import hierarchical
from mac_rag.nn.memory_tokens import MemoryTokens
from tests.nn.helpers import network, random_texts

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
def test_it_is_the_loop_of_algorithm_3(
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


@settings(max_examples=20, deadline=None)
@given(documents=st.integers(1, 8), more=st.integers(0, 5), prior=st.sampled_from([0, 8]))
def test_a_bank_of_one_group_is_aggregated_at_once(documents: int, more: int, prior: int) -> None:
    built, question = network(prior), random_texts(2)
    bank = built.project(random_texts(documents, seed=1))
    found = hierarchical(built, question, bank, max(2, documents + more))
    torch.testing.assert_close(found, built(question, bank)[0], **CLOSE)


def test_groups_that_never_become_fewer_are_refused() -> None:
    built, question = network(), random_texts(1)
    bank = built.project(random_texts(3, seed=1))
    with pytest.raises(ConfigError, match="at least 2"):
        hierarchical(built, question, bank, 1)
