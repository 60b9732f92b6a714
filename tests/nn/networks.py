"""A small aggregation network, and numbers for it, in float64."""

from __future__ import annotations

import torch
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
