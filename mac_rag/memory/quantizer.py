"""Vector quantisation of memory tokens: a codebook learned by k-means, and the code nearest to each token."""

from __future__ import annotations

import torch
from torch import Tensor

from mac_rag.errors import BankError

# Distances that are in memory at once.
_DISTANCES = 1 << 24
# Tokens of a code that a codebook is learned from at most; more change its centre very little.
_TOKENS_PER_CODE = 256


def nearest_codes(tokens: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor]:
    """For each token `[n, D]` the index of its nearest code of `[C, D]`, and the squared distance to it: both `[n]`."""
    half_norms = codebook.square().sum(1) / 2
    parts = [(part @ codebook.T - half_norms).max(1) for part in tokens.split(max(1, _DISTANCES // len(codebook)))]
    nearest = torch.cat([part.indices for part in parts])
    likeness = torch.cat([part.values for part in parts])
    return nearest, tokens.square().sum(1) - 2 * likeness


def fit(phi: Tensor, codes: int, *, seed: int = 0, iterations: int = 25) -> Tensor:
    """Learns a codebook by k-means (Lloyd's algorithm) on memory tokens.

    It starts at randomly drawn tokens. A code that no token is nearest to moves to a token that is far from its own.

    Args:
        phi: memory tokens `[N, T, D]` of representative documents; at most 256 tokens for each code are used.
        codes: C.
        seed: of the drawing.
        iterations: at most; it ends earlier when nothing moves any more.

    Returns:
        The codebook `[C, D]` in float32.

    Raises:
        BankError: for fewer tokens than codes.
    """
    tokens = phi.detach().float().flatten(0, 1)
    if not 1 <= codes <= len(tokens):
        raise BankError(f"a codebook of {codes} codes takes at least as many memory tokens, got {len(tokens)}")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(tokens), generator=generator).to(tokens.device)
    tokens = tokens[order[: codes * _TOKENS_PER_CODE]]
    codebook = tokens[:codes].clone()
    for _ in range(iterations):
        nearest, distance = nearest_codes(tokens, codebook)
        counts = nearest.bincount(minlength=codes)
        moved = torch.zeros_like(codebook).index_add_(0, nearest, tokens) / counts.clamp(min=1)[:, None]
        empty = (counts == 0).nonzero().squeeze(1)
        moved[empty] = tokens[distance.topk(len(empty)).indices]
        if torch.equal(moved, codebook):
            break
        codebook = moved
    return codebook
