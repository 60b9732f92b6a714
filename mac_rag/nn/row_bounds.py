"""Rows of a bank that a question need not look at, because they cannot matter to it.

The document prior puts most documents so far below the best one that whatever their keys are, they weigh nothing in
float arithmetic. To know that costs one norm for each row instead of T times S products of keys and queries.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def longest_keys(keys: Tensor) -> Tensor:
    """The largest norm of each row's keys, in at least float32: `[..., k, T, d] -> [..., k]`."""
    norms: Tensor = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.promote_types(keys.dtype, torch.float32))
    return norms.amax(-1)


def needed_rows(query: Tensor, longest: Tensor, tokens: int, bias: Tensor, floor: Tensor) -> Tensor:
    """Which rows can matter to each question; all others together weigh less than a rounding of its softmax.

    A logit is at most the product of both norms, and the bias (Cauchy and Schwarz).

    Args:
        query: `[B, H, S, d]`, scaled.
        longest: `[G, H, k]`, the largest norm of each row's keys, each for B / G questions; G is 1 or B.
        tokens: T, of a row.
        bias: `[B, H, k]`.
        floor: `[B, H, S]`, what the largest logit over all rows is known to reach.

    Returns:
        `[B, k]`, True for rows that are needed.
    """
    numbers = torch.promote_types(query.dtype, torch.float32)
    highest = query.to(numbers).norm(dim=-1)[..., None] * longest[:, :, None] + bias[:, :, None]  # [B, H, S, k]
    nothing = math.log(torch.finfo(numbers).eps / (bias.shape[-1] * tokens))
    return torch.any((highest - floor[..., None] > nothing).flatten(1, 2), 1)
