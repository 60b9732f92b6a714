"""PyTorch's fused attention kernels, with the log-sum-exp that `torch.nn.functional` does not return."""

from __future__ import annotations

import torch
from torch import Tensor


def fused_cpu(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Torch's kernel for CPUs: attended `[G, H, Q, d]` and log-sum-exp `[G, H, Q]`; so the two below.

    Args:
        bias: `[G, H, Q, keys]`, added to the logits.
    """
    attended, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, attn_mask=bias, scale=1.0
    )
    return attended, lse


def fused_flash(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """FlashAttention, in half precision on CUDA."""
    attended, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, scale=1.0)
    return attended, lse


def fused_efficient(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Memory-efficient attention on CUDA, which pads its log-sum-exp."""
    attended, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, keys, values, None, compute_log_sumexp=True, scale=1.0
    )
    return attended, lse.narrow(2, 0, query.shape[2])
