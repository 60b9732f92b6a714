"""Decoder layers of few operations against transformers' own, in float64."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from mac_rag.nn.cpu_decoder import _FewOperations, use_few_operations

SIZES = {
    "vocab_size": 50, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
KINDS = ["llama", "mistral", "qwen2"]


def pair(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """An LM as it is in float64, and with layers of few operations in another dtype."""
    torch.manual_seed(0)
    few = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES), dtype=torch.float32).to(dtype).eval()
    for name, weight in few.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(weight, 1.0, 0.5)
    plain = deepcopy(few).double()
    use_few_operations(few)
    return plain, few


@torch.no_grad()
def states(lm: Any) -> Tensor:
    """Logits of two texts, one with padding, and of two more tokens that follow them."""
    cache = DynamicCache()
    ids = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    first = lm(ids, attention_mask=mask[:, :7], position_ids=positions[:, :7], past_key_values=cache).logits
    then = lm(ids[:, :2], attention_mask=mask, position_ids=positions[:, 7:], past_key_values=cache).logits
    return torch.cat([first[:, 3:], then], 1).double()


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_transformers(kind: str) -> None:
    plain, few = pair(kind)
    assert isinstance(few.base_model.layers[0], _FewOperations)
    torch.testing.assert_close(states(few), states(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_loses_no_more_than_in_transformers(kind: str) -> None:
    plain, few = pair(kind, torch.bfloat16)
    exact = states(plain)
    theirs = states(deepcopy(plain).to(torch.bfloat16))
    assert (states(few) - exact).norm() <= 1.1 * (theirs - exact).norm()


def test_gradients_are_left_to_transformers() -> None:
    plain, few = pair("llama")
    ids = torch.arange(5, 12)[None]
    for lm in (plain, few):
        lm(ids, labels=ids).loss.backward()
    for expected, weight in zip(plain.parameters(), few.parameters(), strict=True):
        torch.testing.assert_close(weight.grad.double(), expected.grad, rtol=1e-3, atol=1e-5)


def test_what_is_attached_to_a_linear_layer_works() -> None:
    plain, few = pair("llama")
    for lm in (plain, few):
        lm.model.layers[1].self_attn.v_proj.register_forward_hook(lambda _, __, output: output + 1)
    torch.testing.assert_close(states(few), states(plain), rtol=1e-4, atol=1e-4)
