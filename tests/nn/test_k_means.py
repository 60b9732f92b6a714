"""k-means: against brute force, and where clusters are known."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mac_rag.nn.product_quantizer import k_means, nearest_codes

WIDTH = 8


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distortion(vectors: Tensor, codebook: Tensor) -> float:
    return float(torch.cdist(vectors, codebook).min(1).values.square().mean())


@settings(max_examples=30, deadline=None)
@given(vectors=st.integers(1, 20), codes=st.integers(1, 20), seed=st.integers(0, 1000))
def test_the_nearest_codes_are_those_of_brute_force(vectors: int, codes: int, seed: int) -> None:
    some, codebook = random(seed, vectors, WIDTH), random(seed + 1, codes, WIDTH)
    nearest, squared = nearest_codes(some, codebook)
    distances = (some.double()[:, None] - codebook.double()).norm(dim=-1)
    chosen = distances.gather(1, nearest[:, None])[:, 0]
    torch.testing.assert_close(chosen, distances.min(1).values)
    torch.testing.assert_close(squared.double(), chosen.square(), atol=1e-4, rtol=1e-4)


def test_clusters_are_found() -> None:
    centres = 100 * random(0, 5, WIDTH)
    vectors = centres[torch.arange(60) % 5] + 0.01 * random(1, 60, WIDTH)
    best = min((k_means(vectors, 5, seed=seed) for seed in range(8)), key=lambda found: distortion(vectors, found))
    assert torch.cdist(centres, best).min(1).values.max() < 0.1


def test_every_code_is_the_mean_of_the_vectors_nearest_to_it() -> None:
    vectors = random(0, 120, WIDTH)
    codebook = k_means(vectors, 12, iterations=100)
    nearest = torch.cdist(vectors, codebook).argmin(1)
    for code in range(12):
        torch.testing.assert_close(codebook[code], vectors[nearest == code].mean(0))
    assert distortion(vectors, codebook) < distortion(vectors, k_means(vectors, 12, iterations=1))
    assert torch.equal(codebook, k_means(vectors, 12, iterations=100))
    assert not torch.equal(codebook, k_means(vectors, 12, iterations=100, seed=1))


def test_codes_without_vectors_are_put_to_use() -> None:
    """Even where most vectors are equal, so that most codes start at the same place."""
    vectors = torch.cat([torch.zeros(150, WIDTH), random(0, 12, WIDTH)])
    assert distortion(vectors, k_means(vectors, 13)) < 1e-6


def test_as_many_codes_as_vectors() -> None:
    vectors = random(0, 6, WIDTH)
    assert distortion(vectors, k_means(vectors, 6)) < 1e-6
