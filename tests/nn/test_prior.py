"""The document prior: its keys without their zeros, and the recency term against a plain loop."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.nn import prior
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.attended_bank import AttendedBank
from mac_rag.nn.attention import direct_attention, recomputing_attention
from mac_rag.nn.bank_view import BankProjection
from mac_rag.nn.hierarchical import hierarchical
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.prior import CANDIDATES, Candidates, ChosenKeys, PriorKeys, RankedFirst
from tests.nn.helpers import network, random, random_texts


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
def test_products_and_choices_of_keys(
    rows: list[int], width: int, questions: int, seed: int, data: st.DataObject
) -> None:
    dense = [torch.randn(count, 3, generator=torch.Generator().manual_seed(seed + n)) for n, count in enumerate(rows)]
    words = [lexical(count, width, seed + 10 + n) for n, count in enumerate(rows)]
    plain = torch.cat([torch.cat(parts, 1) for parts in zip(dense, words)])
    parts = [PriorKeys.of(*part) for part in zip(dense, words)]
    queries = torch.cat([torch.randn(questions, 3), lexical(questions, width, seed + 20)], 1)
    keys = PriorKeys.cat(parts)
    torch.testing.assert_close(keys.products(queries), queries @ plain.T)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(plain), max_size=len(plain))), dtype=torch.bool)
    kept = keys.kept(mask)
    assert len(kept) == int(mask.sum())
    torch.testing.assert_close(kept.products(queries), queries @ plain[mask].T)
    for of, found in ((plain, keys), (plain[mask], kept)):
        [held] = found._parts  # so few are one part
        [sorted_anew] = PriorKeys.of(of[:, :3], of[:, 3:])._parts
        assert all(map(torch.equal, held.lexical, sorted_anew.lexical))
        assert torch.equal(held._matrix.to_dense(), of[:, 3:])  # what a GPU multiplies with
    if len(plain):
        numbers = st.lists(st.integers(0, len(plain) - 1), min_size=2, max_size=2)
        index = torch.tensor(data.draw(st.lists(numbers, min_size=questions, max_size=questions)))
        chosen = ChosenKeys(keys, index)
        torch.testing.assert_close(chosen.products(queries), (queries @ plain.T).gather(1, index))
        assert torch.equal(chosen.summaries, plain[index, :3])


@settings(max_examples=60, deadline=None)
@given(
    first=st.integers(0, 30),
    changes=st.lists(st.integers(1, 9) | st.floats(0, 1), max_size=8),
    seed=st.integers(0, 999),
)
def test_keys_after_changes_are_those_of_what_is_left(first: int, changes: list[int | float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def made(count: int) -> Tensor:
        return torch.cat([torch.randn(count, 3, generator=generator), lexical(count, 7, seed + count)], 1)

    plain = made(first)
    keys = PriorKeys.of(plain[:, :3], plain[:, 3:])
    queries = torch.cat([torch.randn(2, 3, generator=generator), lexical(2, 7, seed)], 1)
    # As if so few were many: nothing is copied that does not have to be.
    with patch.object(prior, "_LARGE", 2), patch.object(prior, "_SHARE", 3):
        for change in changes:
            if isinstance(change, int):
                new = made(change)
                plain, keys = torch.cat([plain, new]), PriorKeys.cat([keys, PriorKeys.of(new[:, :3], new[:, 3:])])
            else:
                mask = torch.rand(len(plain), generator=generator) < change
                plain, keys = plain[mask], keys.kept(mask)
            assert len(keys) == len(plain)
            torch.testing.assert_close(keys.products(queries), queries @ plain.T)
            index = torch.randperm(len(plain), generator=generator)
            torch.testing.assert_close(keys.products_of(queries, index), queries @ plain[index].T)
            assert torch.equal(keys.summaries(index), plain[index, :3])
            held = sum(len(part.dense) for part in keys._parts)
            assert held <= max(2, 1.5 * len(plain)), "what is gone takes no more than a third"


def test_a_change_of_many_keys_copies_none_of_them() -> None:
    many = PriorKeys.of(torch.randn(1 << 15, 2), None)
    [whole] = many._parts
    changed = PriorKeys.cat([many, PriorKeys.of(torch.randn(1, 2), None)])
    mask = torch.ones(len(changed), dtype=torch.bool)
    mask[7] = False
    [first, _] = changed.kept(mask)._parts
    assert first.dense is whole.dense


def test_zeros_of_keys_take_no_memory() -> None:
    words = torch.zeros(100, 3072)
    words[:, :80] = 1.0
    keys = PriorKeys.of(torch.zeros(100, 384), words)
    [part] = keys._parts
    assert part.lexical is not None
    tensors = (part.dense, *part.lexical)
    assert sum(tensor.nbytes for tensor in tensors) == 100 * (384 * 4 + 80 * 8) + 3073 * 8


def test_numbers_in_bf16_are_multiplied_as_numbers_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.rand(50, 30, generator=generator) * (torch.rand(50, 30, generator=generator) < 0.3)
    whole = PriorKeys.of(torch.rand(50, 4, generator=generator), words.bfloat16().float())
    [part] = whole._parts
    assert part.lexical is not None
    half = PriorKeys(part.dense, part.lexical._replace(weights=part.lexical.weights.bfloat16()))
    queries = torch.rand(3, 34, generator=generator)
    assert torch.equal(half.products(queries), whole.products(queries))
    index = torch.tensor([7, 0])
    assert torch.equal(half.products_of(queries, index), whole.products_of(queries, index))


DAY = 86_400_000_000


def recent(**options: object) -> AggregationNetwork:
    """A network whose recency term matters: random texts count as alike, and the prior does not decide alone."""
    built = network(recency=True, **options).eval()
    with torch.no_grad():
        built.prior.log_scale.fill_(0.5)
        for parameter, value in zip(built.recency.parameters(), (1.5, 0.7, 0.4, 0.8), strict=True):
            parameter.fill_(value)
    return built


def dated(built: AggregationNetwork, phi: MemoryTokens, days: list[int]) -> BankProjection:
    return replace(built.project(phi), dates=torch.tensor(days) * DAY)


def scores_of(built: AggregationNetwork, question: MemoryTokens, bank: BankProjection, **options: object) -> Tensor:
    return AttendedBank(built, bank, built.prior_queries(question), dtype=torch.float64, **options).scores


def plain_loop(
    built: AggregationNetwork,
    question: MemoryTokens,
    bank: BankProjection,
    asked: list[int | None],
    visible: Tensor | None = None,
) -> list[list[float]]:
    """The term as `mac_rag.nn.prior` defines it, pair by pair, with Python's numbers."""
    term, prior = built.recency, built.prior
    plain = prior.score(prior.queries(question), bank.prior_keys)
    tau = math.exp(prior.log_scale.item())
    a, alpha, beta, gamma = (p.item() for p in (term.strength, term.alike, term.bias, term.about))
    found = []
    for b, row in enumerate(plain.tolist()):
        seen = [d for d in range(len(row)) if visible is None or bool(visible[b, d])]
        best = sorted(seen, key=lambda d: -row[d])[:CANDIDATES]
        new = list(row)
        for d in best:
            for other in best:
                ours, theirs = int(bank.dates[d]), int(bank.dates[other])
                moment = asked[b]
                if moment is not None and (theirs > moment or (ours <= moment and theirs <= ours)):
                    continue  # the other is later than the question, or not newer
                if moment is None and theirs <= ours:
                    continue
                alike = float(bank.prior_keys[d].detach() @ bank.prior_keys[other].detach())
                logit = alpha * tau * (alike - 1) + gamma * (row[other] - row[d]) + beta
                new[d] -= math.log1p(math.exp(a)) / (1 + math.exp(-logit))
        found.append([value if visible is None or visible[b, d] else -math.inf for d, value in enumerate(new)])
    return found


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_recency_term_equals_a_plain_loop_over_pairs(data: st.DataObject) -> None:
    documents = data.draw(st.integers(1, 9))
    days = data.draw(st.lists(st.integers(-3, 3), min_size=documents, max_size=documents))
    asked = data.draw(st.lists(st.none() | st.integers(-3, 3), min_size=2, max_size=2))
    built, question, phi = recent(), random_texts(2), random_texts(documents, seed=1)
    bank = dated(built, phi, days)
    visible = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=documents, max_size=documents), min_size=2, max_size=2))
    )
    visible[:, data.draw(st.integers(0, documents - 1))] = True
    moments = [None if day is None else day * DAY for day in asked]
    last = torch.iinfo(torch.int64).max
    found = scores_of(
        built,
        question,
        bank,
        mask=visible,
        asked=torch.tensor([last if moment is None else moment for moment in moments]),
    )
    expected = torch.tensor(plain_loop(built, question, bank, moments, visible), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_recency_looks_among_the_documents_that_the_prior_ranks_first_alone() -> None:
    built, question, phi = recent(), random_texts(2), random_texts(CANDIDATES + 9, seed=1)
    bank = dated(built, phi, torch.arange(CANDIDATES + 9).tolist())
    expected = torch.tensor(plain_loop(built, question, bank, [None, None]), dtype=torch.float64)
    torch.testing.assert_close(scores_of(built, question, bank), expected, rtol=1e-12, atol=1e-12)


def test_a_newer_document_takes_from_an_older_one_like_it_and_equal_dates_do_not() -> None:
    built, question = recent(), random_texts(1)
    twice = MemoryTokens(random(1, 3, 16, seed=1).repeat(2, 1, 1))
    plain = built.prior_scores(question, built.project(twice))
    older, newer = scores_of(built, question, dated(built, twice, [1, 2]))[0]
    assert older < plain[0, 0] - 0.5
    assert newer == plain[0, 1]
    assert torch.equal(scores_of(built, question, dated(built, twice, [2, 2])), plain)


def test_a_question_about_a_time_prefers_what_was_new_then() -> None:
    built, question = recent(), random_texts(3)
    versions = MemoryTokens(random(1, 3, 16, seed=1).repeat(3, 1, 1))
    bank = dated(built, versions, [1, 3, 5])
    found = scores_of(built, question, bank, asked=torch.tensor([4, 9, 0]) * DAY)
    assert found[0].argmax() == 1
    assert found[1].argmax() == 2
    assert len(found[2].unique()) == 1  # it means none of them, so none is better


def test_hidden_documents_have_exactly_no_influence() -> None:
    built, question = recent(), random_texts(2)
    phi, mask = random_texts(6, seed=1), torch.tensor([[1, 1, 0, 1, 0, 1]]).bool().expand(2, -1)
    results = []
    for seed, hidden_days in ((3, (99, 98)), (4, (-99, 0))):
        tokens = phi.tokens.clone()
        tokens[[2, 4]] = random(2, 3, 16, seed=seed)
        tokens[[2, 4]] = tokens[[2, 4]] if seed == 3 else tokens[[0, 1]]  # like documents that are seen
        bank = dated(built, MemoryTokens(tokens), [1, 2, hidden_days[0], 4, hidden_days[1], 6])
        results.append((scores_of(built, question, bank, mask=mask)[mask], built(question, bank, mask=mask)[0]))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_without_recency_it_is_the_prior_bit_for_bit() -> None:
    built, plain = recent(), network().eval()
    plain.load_state_dict({name: value for name, value in built.state_dict().items() if "recency" not in name})
    question, phi = random_texts(2), random_texts(5, seed=1)
    bank = dated(built, phi, [1, 2, 3, 4, 5])
    built.use_recency = False
    assert torch.equal(built(question, bank)[0], plain(question, bank)[0])
    built.use_recency = True
    assert (built(question, bank)[0] - plain(question, bank)[0]).abs().max() > 1e-3
    # Without dates nothing is newer.
    assert torch.equal(built(question, built.project(phi))[0], plain(question, bank)[0])


@pytest.mark.parametrize("slots", [1, 2])
def test_all_ways_to_attend_see_the_same_scores(slots: int) -> None:
    built, question, phi = recent(slots=slots), random_texts(3), random_texts(7, seed=1)
    bank = dated(built, phi, [3, 1, 4, 1, 5, 9, 2])
    asked = torch.tensor([4, 9, 2]) * DAY
    with torch.no_grad():
        expected = built(question, bank, asked=asked, attention=direct_attention)[0]
        torch.testing.assert_close(built(question, bank, asked=asked)[0], expected)
        chosen = bank.select(torch.arange(7).expand(3, -1))
        torch.testing.assert_close(built(question, chosen, asked=asked)[0], expected)
        if slots == 1:
            torch.testing.assert_close(hierarchical(built, question, bank, 7, asked=asked), expected)
    torch.testing.assert_close(built(question, bank, asked=asked, attention=recomputing_attention)[0], expected)


def test_candidates_of_parts_are_those_of_the_whole() -> None:
    built, question, phi = recent(), random_texts(2), random_texts(90, seed=1)
    bank = dated(built, phi, torch.randperm(90, generator=torch.Generator().manual_seed(0)).tolist())
    queries = built.prior_queries(question)
    whole = scores_of(built, question, bank)
    parts = []
    for start, stop in ((0, 1), (1, 80), (80, 90)):
        part = replace(built.project(phi[torch.arange(start, stop)]), dates=bank.dates[start:stop])
        parts.append(AttendedBank(built, part, queries, dtype=torch.float64))
    among = Candidates.of_all([part.candidates for part in parts])
    for part in parts:
        part.among = among
    torch.testing.assert_close(torch.cat([part.scores for part in parts], 1), whole)


def test_rows_of_one_score_come_in_their_order() -> None:
    keys = random(5, 4)
    first = RankedFirst.among(torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]]), keys, torch.arange(5))
    assert first.rows.tolist() == [[1, 2, 4, 0, 3]]
