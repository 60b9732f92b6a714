"""PyTorch's fused attention kernels with their log-sum-exp, which `torch.nn.functional` does not return.

All take queries `[G, H, Q, d]`, already scaled, and keys and values `[G, H, N, d]`, and return the attended values
`[G, H, Q, d]` and the log-sum-exp `[G, H, Q]`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fused_cpu(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Torch's kernel for CPUs.

    Args:
        query, keys, values: as above.
        bias: `[G, H, Q, N]`, added to the logits; None for no bias.
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
    """Memory-efficient attention on CUDA; the kernel pads its log-sum-exp, which is cut to Q here."""
    attended, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, keys, values, None, compute_log_sumexp=True, scale=1.0
    )
    return attended, lse.narrow(2, 0, query.shape[2])
