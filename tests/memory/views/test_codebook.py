"""Codebook banks: k-means, quantised banks, and attention over codes against attention over all tokens in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.data.types import Document
from mac_rag.errors import BankError
from mac_rag.memory import MemoryBank
from mac_rag.memory.quantizer import fit
from mac_rag.memory.views.codebook import CodebookView, quantize
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.attention import direct_attention, streaming_attention
from mac_rag.nn.memory_tokens import MemoryTokens

TOKENS, WIDTH = 3, 8


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def questions(seed: int, count: int) -> MemoryTokens:
    return MemoryTokens(random(seed, count, TOKENS, WIDTH).double())


def network(prior: bool) -> AggregationNetwork:
    torch.manual_seed(0)
    made = AggregationNetwork(WIDTH, blocks=2, heads=2, head_width=4, prior_width=5 if prior else 0).double()
    for parameter in made.parameters():  # away from the start, where blocks are much alike
        parameter.data += 0.2 * random(parameter.numel(), *parameter.shape)
    return made.requires_grad_(False)


PLAIN, WITH_PRIOR = network(False), network(True)


def coded(seed: int, count: int, codes: int) -> MemoryBank:
    bank = MemoryBank("f00d", codebook=random(seed + 1, codes, WIDTH))
    put(bank, range(count), seed)
    return bank


def put(bank: MemoryBank, numbers: range, seed: int) -> None:
    documents = [Document(str(number), f"text {number}", {"n": number}) for number in numbers]
    bank.put(documents, random(seed, 2 * len(documents), TOKENS, WIDTH), [2] * len(documents))


def view_of(aggregation: AggregationNetwork, bank: MemoryBank, chunk_rows: int = 8192) -> CodebookView:
    return CodebookView(aggregation, bank, device="cpu", dtype=torch.float64, chunk_rows=chunk_rows)


def test_k_means_finds_clusters() -> None:
    centres = 100 * random(0, 5, WIDTH)
    phi = (centres[torch.arange(60) % 5] + 0.01 * random(1, 60, WIDTH)).view(20, 3, WIDTH)
    best = min((fit(phi, 5, seed=seed) for seed in range(8)), key=lambda found: distortion(phi, found))
    assert torch.cdist(centres, best).min(1).values.max() < 0.1


def distortion(phi: Tensor, codebook: Tensor) -> float:
    return float(torch.cdist(phi.flatten(0, 1), codebook).min(1).values.square().mean())


def test_every_code_is_the_mean_of_the_tokens_nearest_to_it() -> None:
    phi = random(0, 40, TOKENS, WIDTH)
    codebook = fit(phi, 12, iterations=100)
    nearest = torch.cdist(phi.flatten(0, 1), codebook).argmin(1)
    for code in range(12):
        torch.testing.assert_close(codebook[code], phi.flatten(0, 1)[nearest == code].mean(0))
    assert distortion(phi, codebook) < distortion(phi, fit(phi, 12, iterations=1))
    assert torch.equal(codebook, fit(phi, 12, iterations=100))
    assert not torch.equal(codebook, fit(phi, 12, iterations=100, seed=1))


def test_codes_without_tokens_are_put_to_use() -> None:
    """Even where most tokens are equal, so that most codes start at the same place."""
    phi = torch.cat([torch.zeros(50, TOKENS, WIDTH), random(0, 4, TOKENS, WIDTH)])
    assert distortion(phi, fit(phi, 13)) < 1e-6


def test_more_codes_than_tokens() -> None:
    phi = random(0, 2, TOKENS, WIDTH)
    assert distortion(phi, fit(phi, 6)) < 1e-6
    for codes in (0, 7):
        with pytest.raises(BankError, match=f"{codes} codes"):
            fit(phi, codes)


def test_a_quantised_bank_keeps_everything_but_precision() -> None:
    bank, codebook = MemoryBank("f00d"), random(5, 6, WIDTH)
    put(bank, range(4), 0)
    bank.merge(["0", "2"], random(1, 1, TOKENS, WIDTH))
    quantised = quantize(bank, codebook)
    assert quantised.fingerprint == "f00d"
    assert [entry.members for entry in quantised] == [entry.members for entry in bank]
    assert torch.equal(quantised.phi, codebook[torch.cdist(bank.phi, codebook).argmin(-1)])


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 12), codes=st.integers(1, 9), chunk_rows=st.integers(1, 10), seed=st.integers(0, 2**32),
    attention=st.sampled_from([direct_attention, streaming_attention]),
)  # fmt: skip
def test_attention_over_codes_is_attention_over_the_quantised_bank(
    count: int, codes: int, chunk_rows: int, seed: int, attention: object
) -> None:
    bank, question = coded(seed, count, codes), questions(seed + 2, 3)
    view = view_of(PLAIN, bank, chunk_rows)
    assert view.documents == len(bank.codes(0, 2 * count).unique())
    phi, mass = PLAIN(question, view, attention=attention, mass=True)
    expected, expected_mass = PLAIN(
        question, PLAIN.project(MemoryTokens(bank.phi.double())), attention=direct_attention, mass=True
    )
    torch.testing.assert_close(phi, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(view.row_mass(mass), expected_mass, rtol=0, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=8), seed=st.integers(0, 2**32))
def test_a_view_follows_its_bank(steps: list[tuple[int, int]], seed: int) -> None:
    """Any inserts, updates and deletions leave what a view made afterwards has."""
    bank = MemoryBank("f00d", codebook=random(seed, 7, WIDTH))
    view = view_of(WITH_PRIOR, bank)
    for number, (first, count) in enumerate(steps):
        if str(first) in bank and count < 3:
            bank.delete(str(first))
        else:
            put(bank, range(first, first + count), seed + number)
        view.refresh()
        fresh = view_of(WITH_PRIOR, bank)
        assert torch.equal(view.counts, fresh.counts)
        assert torch.equal(view.row_keys, fresh.row_keys)
        assert view.counts.sum() == TOKENS * len(bank.row_keys)
        if len(bank):
            index, question = torch.randint(len(bank.row_keys), (2, 3)), questions(number, 2)
            ours, theirs = (WITH_PRIOR(question, each.select(index))[0] for each in (view, fresh))
            # A matrix product's last bit may depend on where its operands lie in memory.
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 8), chosen=st.integers(1, 10), chunk_rows=st.integers(1, 20), seed=st.integers(0, 2**32))
def test_selected_rows_are_expanded(count: int, chosen: int, chunk_rows: int, seed: int) -> None:
    """With the prior on, attention over selected rows is attention over the quantised tokens of just these."""
    bank, question = coded(seed, count, 7), questions(seed + 2, 3)
    view = view_of(WITH_PRIOR, bank, chunk_rows)
    index = torch.randint(2 * count, (3, chosen), generator=torch.Generator().manual_seed(seed))
    expanded = view.select(index)
    assert expanded.documents == chosen
    found, mass = WITH_PRIOR(question, expanded, mass=True)
    again = torch.randint(chosen, (3, 2), generator=torch.Generator().manual_seed(seed))
    narrowed = WITH_PRIOR(question, expanded.select(again))[0]
    for one in range(3):
        rows = MemoryTokens(bank.phi[index[one]].double())
        expected, expected_mass = WITH_PRIOR(question[one : one + 1], WITH_PRIOR.project(rows), mass=True)
        torch.testing.assert_close(found[one : one + 1], expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(mass[one : one + 1], expected_mass, rtol=0, atol=1e-10)
        few = WITH_PRIOR(question[one : one + 1], WITH_PRIOR.project(rows[again[one]]))[0]
        torch.testing.assert_close(narrowed[one : one + 1], few, rtol=0, atol=1e-10)


def test_rows_are_chosen_by_the_prior_keys_of_their_quantised_tokens() -> None:
    bank = coded(0, 5, 7)
    expected = WITH_PRIOR.project(MemoryTokens(bank.phi.double())).prior_keys
    torch.testing.assert_close(view_of(WITH_PRIOR, bank).row_prior_keys, expected)
    assert view_of(PLAIN, bank).row_prior_keys is None


def test_the_prior_takes_a_selection() -> None:
    view = view_of(WITH_PRIOR, coded(0, 5, 7))
    with pytest.raises(ValueError, match="prior"):
        WITH_PRIOR(questions(1, 2), view)


def test_a_bank_without_codebook() -> None:
    with pytest.raises(BankError, match="codebook"):
        view_of(PLAIN, MemoryBank("f00d"))
