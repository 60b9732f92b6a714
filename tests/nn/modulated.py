"""Base LMs in float64 with a modulation of each kind, and prompts of unequal length for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mac_rag.config import BaseLMConfig, ModulationConfig, PromptFormat
from mac_rag.lm.base_lm import BaseLM
from mac_rag.nn.modulation import FiLM, LoRA, ModulationNetwork, PrefixTuning

TOKENS = 4
PROMPTS = [[1, 30, 31], [1, 40, 41, 42, 43, 44, 45, 46], [1, 50, 51, 52, 53]]
ANSWERS = [[60, 61, 2], [62, 2], [63, 64, 65, 66, 2]]
EACH = [(lm, kind) for lm in ("llama", "gpt2") for kind in ("prefix", "lora", "film")]


def build(folder: Path, kind: Any, **options: Any) -> tuple[BaseLM, ModulationNetwork, Tensor]:
    lm = BaseLM.load(BaseLMConfig(name=str(folder)), PromptFormat(), torch.device("cpu"))
    lm.double()
    torch.manual_seed(5)
    shape = lm.shape(ModulationConfig(kind=kind))
    network: ModulationNetwork
    if kind == "prefix":
        network = PrefixTuning(shape, TOKENS, lm.width, **options)
    elif kind == "lora":
        network = LoRA(shape, TOKENS, lm.width, **options)
    else:
        network = FiLM(shape, lm.width, **options)
    # Away from their start at zero, and strong enough to change what is generated.
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return lm, network.double(), torch.randn(len(PROMPTS), TOKENS, lm.width, dtype=torch.float64)
