"""Bounds that tell which rows of a bank can matter to a question; attention skips the others.

The document prior puts most documents so far below the best one that they weigh nothing in floating point, whatever
their keys are. A bound costs one norm for each row, where attention costs T times S products of keys and queries.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Rows whose bounds are computed at a time, for each query of each question.
_BOUNDED = 1024


def longest_keys(keys: Tensor) -> Tensor:
    """The largest norm of each row's keys, in at least float32: `[..., k, T, d] -> [..., k]`."""
    norms: Tensor = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.promote_types(keys.dtype, torch.float32))
    return norms.amax(-1)


def needed_rows(query: Tensor, longest: Tensor, tokens: int, bias: Tensor, floor: Tensor) -> Tensor:
    """Tells which rows can matter to each question. All others together weigh less than a rounding of its softmax.

    By Cauchy and Schwarz, a logit is at most the product of the two norms, plus the bias.

    Args:
        query: `[B, H, S, d]`, already scaled.
        longest: `[G, H, k]`, the largest norm of each row's keys, for runs of B / G questions; G is 1 or B.
        tokens: T, tokens of a row.
        bias: `[B, H, k]`.
        floor: `[B, H, S]`, a lower bound of the largest logit over all rows.

    Returns:
        `[B, k]`, True for rows that can matter.
    """
    numbers = torch.promote_types(query.dtype, torch.float32)
    highest = query.to(numbers).norm(dim=-1)[..., None] * longest[:, :, None] + bias[:, :, None]  # [B, H, S, k]
    nothing = math.log(torch.finfo(numbers).eps / (bias.shape[-1] * tokens))
    return torch.any((highest - floor[..., None] > nothing).flatten(1, 2), 1)


def needed_of_all(
    query: Tensor,
    longest: Tensor,
    tokens: int,
    scores: Tensor,
    weights: Tensor,
    floor: Tensor,
    *,
    longest_of_all: Tensor | None = None,
) -> Tensor:
    """Tells which rows of a whole bank can matter to some question, from one score for each question and row.

    The same bound as `needed_rows`, first with the longest key of all rows in the place of each row's, which costs one
    comparison for each question, head and row; then, for the few rows that are left, with their own, and without the
    lightest of them. What is left out at either step weighs, all rows together, less than a rounding.

    Args:
        query, tokens, floor: as `needed_rows` takes them.
        longest: `[H, K]`, the largest norm of each row's keys.
        scores: `[B, K]`, the document prior's scores.
        weights: `[H]`, how each head weighs them; their product is the bias.
        longest_of_all: `[H]`, the largest of each head's `longest`, if it is known.

    Returns:
        Numbers of the rows `[n]`, ascending.
    """
    numbers = torch.promote_types(query.dtype, torch.float32)
    norms, rounding = query.to(numbers).norm(dim=-1), torch.finfo(numbers).eps
    largest = longest.amax(1) if longest_of_all is None else longest_of_all
    beside_bias = (norms * largest[:, None] - floor).amax(-1)  # [B, H]
    nothing = math.log(rounding / (scores.shape[1] * tokens))
    needed = torch.zeros(scores.shape[1], dtype=torch.bool, device=scores.device)
    for head, weight in enumerate(weights):
        needed |= (weight * scores > nothing - beside_bias[:, head, None]).any(0)
    index = needed.nonzero()[:, 0]
    if 2 * len(index) >= scores.shape[1]:  # most rows are read in any case
        return index
    bounds = torch.cat(
        [
            (norms[..., None] * longest[:, None, some] - floor[..., None]).amax(2)
            + weights[:, None] * scores[:, None, some]
            for some in index.split(_BOUNDED)
        ],
        -1,
    )  # [B, H, n]
    lightest = bounds.sort(-1)
    together = lightest.values.logcumsumexp(-1) + math.log(tokens)
    heavy = torch.zeros_like(bounds, dtype=torch.bool).scatter_(-1, lightest.indices, together > math.log(rounding))
    return index[heavy.flatten(0, 1).any(0)]
