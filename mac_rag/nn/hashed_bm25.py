"""Hashed BM25: a few lexical vectors of each text whose products are BM25's scores. They find rare names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from mac_rag.errors import DataError

_SATURATION = 1.5  # k1: how much a word that comes again adds
_LENGTH = 0.75  # b: how far long texts count less
_TYPICAL = 160.0  # tokens of a text, until `count` has counted them


class HashedBM25(nn.Module):
    """Adds each token of a text to one of `R D` places, with a sign; a fixed hash of the token gives place and sign.

    This is feature hashing (Weinberger et al., 2009). The product of two texts is the sum, over the tokens that both
    hold, of the product of the token's two weights; collisions add noise that averages to zero. A weight is the square
    root of the token's rarity times BM25's saturated count (Robertson and Zaragoza, 2009), so that the product has
    BM25's form. Positions do not count and no gradients pass. `count` learns rarity from a corpus; until then all
    tokens are equally rare. Not part of the paper.

    Args:
        vocabulary: tokens in the vocabulary.
        vectors: R.
        width: D.
    """

    def __init__(self, vocabulary: int, vectors: int, width: int) -> None:
        super().__init__()
        self.shape = vectors, width
        self.rarity = nn.Parameter(torch.ones(vocabulary), requires_grad=False)
        self.typical_length = nn.Parameter(torch.tensor(_TYPICAL), requires_grad=False)
        hashed = _hashes(vocabulary)
        self.register_buffer("places", (hashed >> 1) % (vectors * width), persistent=False)
        self.register_buffer("signs", (hashed & 1) * 2.0 - 1.0, persistent=False)
        self.places: Tensor
        self.signs: Tensor

    @torch.no_grad()
    def count(self, texts: Iterable[Sequence[int]]) -> None:
        """Learns from the token ids of a corpus how rare each token is (BM25's idf), and how long a text is.

        Raises:
            DataError: without texts.
        """
        lengths, holding = [], Counter[int]()
        for text in texts:
            lengths.append(len(text))
            holding.update(set(text))
        if not lengths:
            raise DataError("there are no texts to count tokens in; give at least one")
        held = torch.zeros_like(self.rarity)
        held[list(holding)] = torch.tensor([float(number) for number in holding.values()], device=held.device)
        self.rarity.copy_(torch.log1p((len(lengths) - held + 0.5) / (held + 0.5)))
        self.typical_length.fill_(sum(lengths) / len(lengths))

    @torch.no_grad()
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Lexical vectors `[K, R, D]` from token ids and mask `[K, L]`."""
        shown = attention_mask.bool()
        same = (input_ids[:, :, None] == input_ids[:, None]) & shown[:, None]
        counts = same.sum(-1)  # of each token in its text, [K, L]
        relative_length = attention_mask.sum(1, keepdim=True) / self.typical_length
        damping = _SATURATION * (1 - _LENGTH + _LENGTH * relative_length)
        # A token's weight, shared among the places in the text where it stands.
        weights = self.rarity[input_ids].sqrt() * (_SATURATION + 1) / (counts + damping)
        return self.of_tokens(input_ids, weights * shown)

    def of_tokens(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """The sum of K times n tokens' vectors with these weights: `[K, n], [K, n] -> [K, R, D]`."""
        signed = weights * self.signs[tokens]
        vectors, width = self.shape
        hashed = signed.new_zeros(len(tokens), vectors * width)
        hashed.scatter_add_(1, self.places[tokens], signed)
        return hashed.view(-1, vectors, width)


def _hashes(count: int) -> Tensor:
    """Numbers below 2^32 that look random, the same on every machine: MurmurHash3's finaliser of 0, 1, 2, ..."""
    mask = 0xFFFFFFFF
    number = (torch.arange(count) * 0x9E3779B1) & mask
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        number = ((number ^ (number >> shift)) * factor) & mask
    return number ^ (number >> 16)
