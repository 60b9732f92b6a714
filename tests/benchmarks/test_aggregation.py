"""The implementations that the benchmark of aggregation compares give equal results."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import published
from benchmarks.aggregation_cases import Case, Sizes, measured
from benchmarks.generated import GeneratedBank
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.attention import direct_attention
from mac_rag.nn.memory_tokens import MemoryTokens

SIZES = Sizes(tokens=3, width=8, blocks=2, heads=2, head_width=4)
CPU = torch.device("cpu")


@pytest.mark.parametrize("prior_width", [0, 4])
def test_the_published_implementation_is_direct_attention(prior_width: int) -> None:
    torch.manual_seed(0)
    network = AggregationNetwork(8, blocks=2, heads=2, head_width=4, prior_width=prior_width).double()
    question, phi = (MemoryTokens(torch.randn(count, 3, 8, dtype=torch.float64)) for count in (4, 9))
    expected, _ = network(question, network.project(phi), attention=direct_attention)
    torch.testing.assert_close(published.attend(network, question, phi), expected)


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 20), period=st.integers(1, 8))
def test_the_answer_of_a_generated_bank_attends_to_all_its_rows(rows: int, period: int) -> None:
    bank = GeneratedBank(rows, (3, 8), period=period)
    network, question = SIZES.network(CPU), SIZES.question(2, CPU)
    expected, _ = network(question, network.project(MemoryTokens(bank.phi)), attention=direct_attention)
    torch.testing.assert_close(bank.answer(network, question), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(bank.read(0, rows), bank.take(bank.row_keys))


@pytest.mark.parametrize("implementation", ["published", "kept", "streamed"])
def test_each_implementation_is_measured(implementation: str) -> None:
    """`measured` compares the result with that of direct attention itself."""
    measurement = measured(Case(implementation, 2000, 2), SIZES, CPU, rounds=1)
    assert measurement.seconds > 0
    row = SIZES.tokens * SIZES.width * 4
    keys_and_values = 2 * SIZES.blocks * 2 * 4 * 4  # of a token: two heads of four numbers
    expected = {
        "published": (0, 2 * 2000 * row),
        "streamed": (0, 2 * 2000 * row),
        "kept": (2000 * SIZES.tokens * keys_and_values,) * 2,
    }
    assert (measurement.kept_bytes, measurement.moved_bytes) == expected[implementation]
