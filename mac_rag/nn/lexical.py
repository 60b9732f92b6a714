"""Lexical vectors of texts: a few whose products approximate BM25's scores, and one of the years that a text names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mac_rag.errors import DataError

_SATURATION = 1.5  # k1: how much further occurrences of a word add
_LENGTH = 0.75  # b: how much less long texts count
_TYPICAL = 160.0  # typical number of tokens of a text, until `count` measures it


class HashedBM25(nn.Module):
    """Adds each token of a text to one of `R D` places, with a sign; a fixed hash of the token gives place and sign.

    This is feature hashing (Weinberger et al., 2009). The product of two texts is the sum, over the tokens that occur
    in both, of the product of the token's two weights; collisions add noise that averages to zero. A weight is the
    square root of the token's rarity times BM25's saturated count (Robertson and Zaragoza, 2009), so that the product
    has BM25's form. Word order does not count, and no gradients pass. `count` learns rarity from a corpus; until then
    all tokens are equally rare. Not part of the paper.

    Args:
        vocabulary: number of tokens in the vocabulary.
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
        """Learns each token's rarity (BM25's idf) and the mean length of a text from the token ids of a corpus.

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
        # A token's weight, divided among its occurrences in the text.
        weights = self.rarity[input_ids].sqrt() * (_SATURATION + 1) / (counts + damping)
        return self.of_tokens(input_ids, weights * shown)

    def of_tokens(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """For each of K texts the weighted sum of its n tokens' vectors: `[K, n], [K, n] -> [K, R, D]`."""
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


# A vector of the years that a text names: with it, a question finds what was last known at its time.
#
# "In 2001 he moved to Porto" answers "Which team did he play for in 2003?", although it does not contain the question's
# number. So after the lexical vectors of hashed BM25, documents and questions have one more vector, with a place for
# each year:
#
#     c(d)_y = exp(-(y - last(d, y)) / decay)     a(x)_y = weight if y is the first year that x names, else 0
#
# where last(d, y) is the last year up to y that d names. Their product adds weight exp(-(y - last(d, y)) / decay) to
# the product of the other lexical vectors. The vector of a question that names no year is zero.
#
# Not part of the paper.


_LEAST = 1 / 32  # smaller numbers become zeros, which banks need not store


@dataclass(frozen=True)
class Years:
    """Which tokens are years, and how much a year counts.

    Attributes:
        of_tokens: id of each token that is a year -> the year, which lies in `calendar`.
        continuing: ids of tokens that continue a number before them, such as "##7" in BERT's vocabulary.
        vocabulary: number of tokens in the vocabulary.
        calendar: the years that have a place, at most D.
        weight: how much a document counts that names the question's year.
        decay: number of years before the question's year over which this falls to 1/e.
    """

    of_tokens: dict[int, int]
    continuing: list[int]
    vocabulary: int
    calendar: range
    weight: float
    decay: float


class NamedYears(nn.Module):
    """Vectors of the years that texts name.

    Args:
        years: which tokens are years, and how much a year counts.
        width: D.

    Attributes:
        use_years: False ignores the years of questions, to measure their effect.
    """

    def __init__(self, years: Years, width: int) -> None:
        super().__init__()
        self.years = years
        self.width = width
        self.use_years = True
        place = torch.full((years.vocabulary,), -1)
        place[list(years.of_tokens)] = torch.tensor([year - years.calendar.start for year in years.of_tokens.values()])
        continues = torch.zeros(years.vocabulary, dtype=torch.bool)
        continues[years.continuing] = True
        self.register_buffer("place", place, persistent=False)
        self.register_buffer("continues", continues, persistent=False)
        self.place: Tensor
        self.continues: Tensor

    def forward(self, input_ids: Tensor, attention_mask: Tensor, of_questions: bool) -> Tensor:
        """a of questions or c of documents, `[K, D]`.

        Args:
            input_ids, attention_mask: `[K, L]`.
            of_questions: True for questions.
        """
        named = self.named(input_ids, attention_mask)
        if of_questions:
            first = named & (named.cumsum(1) == 1)
            vectors = first * (self.years.weight if self.use_years else 0.0)
        else:
            known = torch.exp(-self.since(named) / self.years.decay)
            vectors = known.where(known >= _LEAST, 0.0)
        return functional.pad(vectors, (0, self.width - vectors.shape[1]))

    def named(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Which years of the calendar each text names, bool `[K, Y]`."""
        shown = attention_mask.bool()
        continued = functional.pad(self.continues[input_ids] & shown, (0, 1))[:, 1:]
        # Tokens that name no year go to one more place at the end, which is cut off.
        place, count = self.place[input_ids], len(self.years.calendar)
        place = place.where((place >= 0) & shown & ~continued, count)
        named = torch.zeros(len(input_ids), count + 1, dtype=torch.bool, device=input_ids.device)
        return named.scatter_(1, place, True)[:, :-1]

    def since(self, named: Tensor) -> Tensor:
        """For each year the years since the last named one, `[K, Y]`; infinite before the first named year."""
        year = torch.arange(named.shape[1], device=named.device, dtype=torch.float32)
        return year - torch.where(named, year, -torch.inf).cummax(1).values
