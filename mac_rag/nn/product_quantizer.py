"""Product quantization of memory tokens: one byte for every few numbers, by codebooks that belong to a model.

The mean of the tokens at the same place of a row is subtracted from a token, which is then rotated so that all groups
of its numbers vary alike, and cut into M groups. Each group is stored as the index of the nearest of 256 codewords, one
byte (optimized product quantization, Ge et al. 2013, with their rotation for normally distributed vectors).

The codebooks are learned once for a model, not from the documents of a bank: a bank can store its very first document
in codes, no codeword reveals a deleted document, and banks filled by several processes are equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

CODEWORDS = 256  # number of values of a byte
# Largest number of elements of a quantizer, far more than any model's has.
_LARGEST = 1 << 26
# Number of tokens to learn codewords from; four times as many lower the error by a hundredth.
_LEARNED = 64 * CODEWORDS
_ITERATIONS = 15
# Number of tokens that are encoded or decoded at a time.
_TOKENS = 1 << 10


class ProductQuantizer:
    """Encodes a model's memory tokens to few bytes, and decodes them.

    Args:
        fingerprint: `MACModel.fingerprint` of the model whose memory tokens it was fitted to.
        whole: number of a row's first tokens that are not quantized.
        mean: `[T, D]`, the mean of the T other tokens of a row.
        rotation: `[D, D]`, with orthonormal columns.
        codewords: `[M, 256, D / M]`.

    Raises:
        ValueError: for tensors that do not fit together, or that have numbers that are not finite.

    Examples:
        >>> rows = torch.randn(300, 4, 8, generator=torch.Generator().manual_seed(0))
        >>> quantizer = ProductQuantizer.fit(rows, 4, fingerprint="0" * 64)
        >>> codes = quantizer.encode(rows)
        >>> codes.shape, codes.dtype, bool((quantizer.decode(codes) - rows).square().mean() < 0.1)
        (torch.Size([300, 4, 4]), torch.uint8, True)
    """

    def __init__(self, fingerprint: str, whole: int, mean: Tensor, rotation: Tensor, codewords: Tensor) -> None:
        width = mean.shape[-1]
        fits = (
            mean.ndim == 2
            and mean.numel() > 0
            and rotation.shape == (width, width)
            and codewords.ndim == 3
            and codewords.shape[:2] == (codewords.shape[0], CODEWORDS)
            and codewords.shape[0] * codewords.shape[2] == width
            and mean.numel() + rotation.numel() + codewords.numel() <= _LARGEST
        )
        tensors = {"mean": mean, "rotation": rotation, "codewords": codewords}
        if not fits or whole < 0:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
            raise ValueError(f"codebooks whose parts do not fit together: {shapes}, {whole} whole tokens")
        if re.fullmatch("[0-9a-f]{64}", fingerprint) is None:
            raise ValueError(f"codebooks of a model with fingerprint {fingerprint!r:.80}, which is none")
        for name, tensor in tensors.items():
            if tensor.dtype != torch.float32 or not tensor.isfinite().all():
                raise ValueError(f"codebooks whose {name} is {tensor.dtype}, or has numbers that are not finite")
        self.fingerprint = fingerprint
        self.whole = whole
        self.mean = mean
        self.rotation = rotation
        self.codewords = codewords

    @property
    def code_bytes(self) -> int:
        """M, number of bytes of a token."""
        return len(self.codewords)

    @property
    def row_shape(self) -> tuple[int, int]:
        """Number of tokens and width of a row, `(whole + T, D)`."""
        return self.whole + self.mean.shape[0], self.mean.shape[1]

    def encode(self, tokens: Tensor) -> Tensor:
        """Codes `[n, T, M]`, uint8, of tokens `[n, T, D]` in float32."""
        centred = (tokens - self.mean).flatten(0, 1)
        none = torch.empty(0, self.code_bytes, dtype=torch.uint8)
        codes = torch.cat([none, *map(self._encoded, centred.split(_TOKENS))])
        return codes.view(*tokens.shape[:2], self.code_bytes)

    def _encoded(self, centred: Tensor) -> Tensor:
        groups = (centred @ self.rotation).split(self.codewords.shape[2], 1)
        nearest = [nearest_codes(group, words)[0] for group, words in zip(groups, self.codewords)]
        return torch.stack(nearest, 1).to(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        """Tokens `[n, T, D]` in float32 of codes `[n, T, M]`."""
        parts = map(self._decoded, codes.flatten(0, 1).split(_TOKENS))
        return torch.cat([self.mean[:0], *parts]).view(*codes.shape[:2], self.mean.shape[1]) + self.mean

    def _decoded(self, codes: Tensor) -> Tensor:
        words = self.codewords[torch.arange(self.code_bytes), codes.long()]
        return words.flatten(1) @ self.rotation.T

    @classmethod
    def fit(cls, rows: Tensor, code_bytes: int, *, fingerprint: str, whole: int = 0, seed: int = 0) -> ProductQuantizer:
        """Learns the codebooks from a model's memory tokens.

        Args:
            rows: `[n, whole + T, D]`, rows of representative documents, without lexical vectors. k-means uses at most
                16,384 of their tokens; means and rotation use all.
            code_bytes: M, number of bytes of a token, a divisor of D.
            fingerprint: fingerprint of the model.
            whole: number of a row's first tokens that are not quantized.
            seed: random seed.

        Raises:
            ValueError: for fewer than 256 tokens, or if M does not divide D.
        """
        tokens = rows[:, whole:].float()
        width = tokens.shape[2]
        if code_bytes < 1 or width % code_bytes:
            raise ValueError(f"{code_bytes} bytes cannot share the {width} numbers of a token evenly; give a divisor")
        if tokens.shape[0] * tokens.shape[1] < CODEWORDS:
            raise ValueError(
                f"{tokens.shape[0]} rows of {tokens.shape[1]} tokens are too few to learn from; give at least "
                f"{CODEWORDS} tokens"
            )
        mean = tokens.mean(0)
        centred = (tokens - mean).flatten(0, 1)
        rotation = _balanced(centred, code_bytes)
        sample = torch.randperm(len(centred), generator=torch.Generator().manual_seed(seed))[:_LEARNED]
        groups = (centred[sample] @ rotation).split(width // code_bytes, 1)
        words = torch.stack([k_means(group, CODEWORDS, seed=seed, iterations=_ITERATIONS) for group in groups])
        return cls(fingerprint, whole, mean, rotation, words)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All its parts by name, as tensors for a file."""
        return {
            "fingerprint": torch.frombuffer(bytearray.fromhex(self.fingerprint), dtype=torch.uint8),
            "whole": torch.tensor([self.whole]),
            "mean": self.mean,
            "rotation": self.rotation,
            "codewords": self.codewords,
        }

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> ProductQuantizer:
        """The quantizer from the tensors of a file.

        Raises:
            ValueError: if they are not those of a quantizer.
        """
        named = {"fingerprint": (torch.uint8, (32,)), "whole": (torch.int64, (1,))}
        missing = {"mean", "rotation", "codewords", *named} ^ tensors.keys()
        if missing:
            raise ValueError(f"codebooks with missing or unknown parts: {', '.join(sorted(missing))[:200]}")
        for name, (dtype, shape) in named.items():
            if tensors[name].dtype != dtype or tensors[name].shape != shape:
                raise ValueError(f"codebooks whose {name} is {list(tensors[name].shape)} in {tensors[name].dtype}")
        fingerprint = bytes(tensors["fingerprint"].tolist()).hex()
        whole = int(tensors["whole"])
        return cls(fingerprint, whole, tensors["mean"], tensors["rotation"], tensors["codewords"])


def _balanced(centred: Tensor, groups: int) -> Tensor:
    """A rotation `[D, D]` after which all groups of numbers vary alike: the products of their variances are balanced.

    Args:
        centred: `[n, D]`, vectors of mean zero.
        groups: M, the number of groups.
    """
    width = centred.shape[1]
    variances, directions = torch.linalg.eigh((centred.T @ centred).double() / len(centred))
    product, members = [0.0] * groups, [list[int]() for _ in range(groups)]
    for axis in reversed(range(width)):  # the largest variance first, to the group that varies least and has room
        open_groups = (group for group in range(groups) if len(members[group]) < width // groups)
        group = min(open_groups, key=lambda group: product[group])
        members[group].append(axis)
        product[group] += math.log(max(float(variances[axis]), torch.finfo(torch.float32).tiny))
    rotation: Tensor = directions[:, torch.tensor(members).flatten()].float().contiguous()
    return rotation


# Number of distances that are computed, and held in memory, at once.
_DISTANCES = 1 << 24
# Largest number of vectors per code to learn from; more hardly change the centroids.
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

    The initial codes are randomly drawn vectors. A code without vectors moves to a vector that is far from its code.

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
