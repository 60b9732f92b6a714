"""k-means: vectors that stand for many others, and the nearest one of each."""

from __future__ import annotations

import torch
from torch import Tensor

# Distances that are computed, and held in memory, at once.
_DISTANCES = 1 << 24
# At most this many vectors per code are used for learning; more hardly change the centroids.
_VECTORS_PER_CODE = 256


def nearest_codes(vectors: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the nearest code of each vector.

    Args:
        vectors: `[n, D]`.
        codebook: `[C, D]`.

    Returns:
        Indices of the nearest codes `[n]`, and squared distances to them `[n]`.
    """
    half_norms = codebook.square().sum(1) / 2
    parts = [(part @ codebook.T - half_norms).max(1) for part in vectors.split(max(1, _DISTANCES // len(codebook)))]
    nearest = torch.cat([part.indices for part in parts])
    similarity = torch.cat([part.values for part in parts])
    return nearest, vectors.square().sum(1) - 2 * similarity


def k_means(vectors: Tensor, codes: int, *, seed: int = 0, iterations: int = 25) -> Tensor:
    """Learns a codebook by Lloyd's algorithm.

    The initial codes are randomly drawn vectors. A code without vectors moves to one that is far from its own code.

    Args:
        vectors: `[n, D]`; at most 256 per code are used.
        codes: C, the number of codes, n at most.
        seed: random seed of the initial codes.
        iterations: maximum number of iterations; learning stops earlier when no code moves.

    Returns:
        The codebook `[C, D]`.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(vectors), generator=generator).to(vectors.device)
    vectors = vectors[order[: codes * _VECTORS_PER_CODE]]
    codebook = vectors[:codes].clone()
    for _ in range(iterations):
        nearest, distance = nearest_codes(vectors, codebook)
        counts = nearest.bincount(minlength=codes)
        centroids = torch.zeros_like(codebook).index_add_(0, nearest, vectors) / counts.clamp(min=1)[:, None]
        empty = (counts == 0).nonzero().squeeze(1)
        centroids[empty] = vectors[distance.topk(len(empty)).indices]
        if torch.equal(centroids, codebook):
            break
        codebook = centroids
    return codebook
