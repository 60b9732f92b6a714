"""Small aggregation networks and base LMs in float64, each with numbers to go through them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.memory_tokens import MemoryTokens

if TYPE_CHECKING:
    from mac_rag.lm.base_lm import BaseLM
    from mac_rag.nn.modulation import ModulationNetwork

WIDTH, TOKENS = 16, 3  # of the aggregation network

LM_TOKENS = 4  # memory tokens that modulate an LM
PROMPTS = [[1, 30, 31], [1, 40, 41, 42, 43, 44, 45, 46], [1, 50, 51, 52, 53]]
ANSWERS = [[60, 61, 2], [62, 2], [63, 64, 65, 66, 2]]
EACH = [
    *[("llama", "prefix"), ("llama", "film"), ("gpt2", "prefix"), ("gpt2", "lora")],
    *(pytest.param(*other, marks=pytest.mark.slow) for other in (("llama", "lora"), ("gpt2", "film"))),
]


def network(prior_width: int = 8, **options: Any) -> AggregationNetwork:
    torch.manual_seed(0)
    built = AggregationNetwork(WIDTH, blocks=2, heads=2, head_width=8, prior_width=prior_width, **options).double()
    for block in built.blocks:
        if block.prior_scale is not None:
            torch.nn.init.uniform_(block.prior_scale, 0.5, 1.5)
    return built


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_texts(count: int, seed: int = 0) -> MemoryTokens:
    """Memory tokens of so many documents or questions."""
    return MemoryTokens(random(count, TOKENS, WIDTH, seed=seed))


def modulated_lm(folder: Path, kind: Any, **options: Any) -> tuple[BaseLM, ModulationNetwork, Tensor]:
    """A base LM, a modulation network of a kind, and phi* of as many questions as there are `PROMPTS`."""
    # Here, because processes that import this module for the rest of it need no transformers, which takes seconds.
    from mac_rag.config import BaseLMConfig, ModulationConfig, PromptFormat
    from mac_rag.lm.base_lm import BaseLM
    from mac_rag.nn.modulation import FiLM, LoRA, PrefixTuning

    lm = BaseLM.load(BaseLMConfig(name=str(folder)), PromptFormat(), torch.device("cpu"))
    lm.double()
    torch.manual_seed(5)
    shape = lm.shape(ModulationConfig(kind=kind))
    network: ModulationNetwork
    if kind == "prefix":
        network = PrefixTuning(shape, LM_TOKENS, lm.width, **options)
    elif kind == "lora":
        network = LoRA(shape, LM_TOKENS, lm.width, **options)
    else:
        network = FiLM(shape, lm.width, **options)
    # Away from their start at zero, and strong enough to change what is generated.
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return lm, network.double(), torch.randn(len(PROMPTS), LM_TOKENS, lm.width, dtype=torch.float64)
