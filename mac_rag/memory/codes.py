"""Which code of a codebook a memory token is nearest to."""

from __future__ import annotations

import torch
from torch import Tensor

# Distances that are in memory at once.
_DISTANCES = 1 << 24


def nearest_codes(tokens: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor]:
    """For each token `[n, D]` the index of its nearest code of `[C, D]`, and the squared distance to it: both `[n]`."""
    half_norms = codebook.square().sum(1) / 2
    parts = [(part @ codebook.T - half_norms).max(1) for part in tokens.split(max(1, _DISTANCES // len(codebook)))]
    nearest = torch.cat([part.indices for part in parts])
    likeness = torch.cat([part.values for part in parts])
    return nearest, tokens.square().sum(1) - 2 * likeness
