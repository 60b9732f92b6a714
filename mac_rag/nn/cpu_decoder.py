"""Decoder layers of Llama's form in few operations, on a CPU and without gradients.

transformers' layers start some hundred operations each. For a single token that takes as long as reading the weights,
and for many tokens most of them read and write all states. Here norms, rotation and residuals are one operation each,
and sums are written in place. Linear layers are called as modules, so whatever is attached to them still works.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

_SUPPORTED = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer)
_ATTENTION = AttentionInterface()


class _FewOperations:
    """Comes before a decoder layer's class; what it does not serve is left to that."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Tensor:
        """The layer's states `[B, L, width]`; arguments as transformers passes them."""
        attention, mlp = self.self_attn, self.mlp
        attend = _ATTENTION.get(attention.config._attn_implementation)
        if (
            torch.is_grad_enabled()
            or self.training
            or hidden_states.device.type != "cpu"
            or position_embeddings is None
            or attend is None
        ):
            given = {"position_embeddings": position_embeddings, "past_key_values": past_key_values}
            states: Tensor = super().forward(hidden_states, attention_mask, **given, **options)  # type: ignore[misc]
            return states
        shape = *hidden_states.shape[:2], -1, attention.head_dim
        x = _normed(hidden_states, self.input_layernorm)
        query, key, value = (linear(x).view(shape) for linear in (attention.q_proj, attention.k_proj, attention.v_proj))
        cos, sin = (part[:, :, None] for part in position_embeddings)
        half = attention.head_dim // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        query, key = (torch.addcmul(part * cos, part.roll(half, -1), sin).transpose(1, 2) for part in (query, key))
        value = value.transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, attention.layer_idx)
        attended, _ = attend(attention, query, key, value, attention_mask, scaling=attention.scaling, **options)
        x = attention.o_proj(attended.flatten(2)).add_(hidden_states)
        after = _normed(x, self.post_attention_layernorm)
        return mlp.down_proj(functional.silu(mlp.gate_proj(after), inplace=True).mul_(mlp.up_proj(after))).add_(x)


def _normed(x: Tensor, norm: Any) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def use_few_operations(model: Any) -> None:
    """Turns every decoder layer of a supported class (Llama, Mistral, Qwen 2) with SiLU into one of few operations."""
    for layer in model.modules():
        if type(layer) in _SUPPORTED and layer.self_attn.config.hidden_act == "silu":
            layer.__class__ = _of_few_operations(type(layer))


@cache
def _of_few_operations(kind: type) -> type:
    return type(kind.__name__, (_FewOperations, kind), {})
