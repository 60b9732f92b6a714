"""The implementations that the benchmark of aggregation compares give equal results."""

from __future__ import annotations

import pytest
import torch

from benchmarks import published
from benchmarks.aggregation import Implementation, Sizes, compared, measured
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.attention import direct_attention
from mac_rag.nn.memory_tokens import MemoryTokens

SIZES = Sizes(documents=2000, questions=2, tokens=3, width=8, blocks=2, heads=2, head_width=4)
CPU = torch.device("cpu")


@pytest.mark.parametrize("prior_width", [0, 4])
def test_the_published_implementation_is_direct_attention(prior_width: int) -> None:
    torch.manual_seed(0)
    network = AggregationNetwork(8, blocks=2, heads=2, head_width=4, prior_width=prior_width).double()
    question, phi = (MemoryTokens(torch.randn(count, 3, 8, dtype=torch.float64)) for count in (4, 9))
    expected, _ = network(question, network.project(phi), attention=direct_attention)
    torch.testing.assert_close(published.attend(network, question, phi), expected)


@pytest.mark.parametrize("implementation", ["published", "kept", "streamed"])
def test_each_implementation_is_measured(implementation: Implementation) -> None:
    """`measured` compares the result with that of direct attention itself."""
    assert measured(implementation, SIZES, CPU, rounds=1).seconds > 0


def test_the_published_implementation_is_compared_with_cached_keys_and_values() -> None:
    assert min(compared(SIZES, 1, CPU)) > 0
