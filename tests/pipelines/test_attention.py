"""Attention by products gives the states and gradients that transformers' own attention gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, T5EncoderModel

from mac_rag.lm.prefix_lm import PrefixLM, PrefixLMConfig
from pipelines.tasks.cpu_attention import attend_by_products, use_products
from tests.helpers import save_bert, save_gpt2, save_llama, save_t5


def prefix_lm(_: Path) -> Any:
    torch.manual_seed(5)
    sizes: dict[str, Any] = {
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
    }
    return PrefixLM(PrefixLMConfig(vocab_size=50, is_decoder=True, hidden_dropout_prob=0.0, **sizes))


def loaded(save: Callable[[Path], Path], kind: Any) -> Callable[[Path], Any]:
    return lambda folder: kind.from_pretrained(save(folder))


@pytest.mark.parametrize(
    "make",
    [
        prefix_lm,
        loaded(save_llama, AutoModelForCausalLM),  # two groups of heads
        loaded(save_gpt2, AutoModelForCausalLM),
        loaded(save_bert, AutoModel),
        loaded(save_t5, T5EncoderModel),  # adds a bias for positions
    ],
)
@pytest.mark.parametrize("padding", [0, 3])
def test_states_and_gradients_are_those_of_the_fused_kernel(
    make: Callable[[Path], Any], padding: int, tmp_path: Path
) -> None:
    model = make(tmp_path).eval()
    ids = torch.randint(3, 50, (2, 9))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][0, :padding] = 0
    if isinstance(model, PrefixLM):
        inputs["segment_ids"] = torch.tensor([[2, 2, 2, 2, 1, 1, 1, 0, 0]] * 2)
        inputs["hidden"] = torch.arange(9).expand(2, -1) == 2

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        states = model.base_model(**inputs).last_hidden_state[:, padding:]
        weights = [p for p in model.base_model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(states.square().sum(), weights, allow_unused=True)
        return states, [g for g in gradients if g is not None]

    expected = run()
    use_products(model)
    torch.testing.assert_close(run(), expected, atol=1e-4, rtol=1e-4)


def test_without_a_mask_a_causal_layer_sees_only_what_was_before() -> None:
    query, key, value = torch.randn(3, 2, 4, 7, 8).unbind()
    layer = torch.nn.Module()
    layer.is_causal = True
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(attend_by_products(layer, query, key, value, None)[0], expected.transpose(1, 2))
    both_ways = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(
        attend_by_products(layer, query, key, value, None, is_causal=False)[0], both_ways.transpose(1, 2)
    )
