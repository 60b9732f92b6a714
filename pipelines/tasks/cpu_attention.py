"""Attention for training on a CPU: matrix products and a softmax instead of PyTorch's fused kernel.

The fused kernel's backward pass hardly uses a CPU's bf16 instructions. So products are faster in bf16 on a CPU that has
them, and slower otherwise: `python -m benchmarks.training_attention` measures both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from mac_rag.nn.dtypes import additive
from pipelines.training_task import TrainerConfig

_NAME = "mac_products"


def use_products_where_faster(model: nn.Module, trainer: TrainerConfig) -> None:
    """As `use_products`, if a run trains in bf16 on a CPU that has instructions for it."""
    if trainer.training_device.type == "cpu" and trainer.precision == "bf16" and multiplies_bf16():
        use_products(model)


def multiplies_bf16() -> bool:
    """True if the CPU multiplies bf16 numbers itself (AVX-512 BF16, or Intel's AMX)."""
    supported: bool = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return supported


def use_products(model: nn.Module) -> None:
    """Switches every transformers model in a module to attention by products, if it is on the CPU."""
    pretrained = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for module in pretrained:
        if module.device.type == "cpu" and module.config._attn_implementation == "sdpa":
            module.set_attn_implementation(_NAME)


def attend_by_products(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Takes the place of transformers' `sdpa_attention_forward`.

    Args:
        module: the attention layer.
        query: `[B, H, L, E]`.
        key, value: `[B, G, S, E]`, for G groups of heads.
        attention_mask: `[B, 1, L, S]`, true or zero where attention is allowed, else false or very low; None for all.
        dropout: dropout probability of the attention weights.
        scaling: factor on the scores; None for `E ** -0.5`.
        is_causal: whether a token attends only to earlier ones if there is no mask; None for the layer's own setting.
        position_bias: `[B, H, L, S]`, added to the scores.
        softcap: smooth bound of the scores; None for no bound.

    Returns:
        The states `[B, L, H, E]`, and None in place of the attention weights.
    """
    heads, groups, length, seen = query.shape[1], key.shape[1], query.shape[2], key.shape[2]
    if groups < heads:
        key, value = (tensor.repeat_interleave(heads // groups, 1) for tensor in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scaling is None else scaling)) @ key.transpose(2, 3)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if position_bias is not None:
        scores = scores + position_bias
    causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    if attention_mask is None and causal and length > 1:
        attention_mask = torch.ones(length, seen, dtype=torch.bool).tril(seen - length)
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            attention_mask = additive(attention_mask, scores.dtype)
        scores = scores + attention_mask.to(scores.dtype)
    with torch.autocast("cpu", enabled=False):  # autocast would compute the softmax in fp32, with twice the bytes
        weights = scores.softmax(-1)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, attend_by_products)
AttentionMaskInterface.register(_NAME, sdpa_mask)
