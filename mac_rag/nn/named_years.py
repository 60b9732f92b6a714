"""A vector of the years that a text names: by it a question finds what was last known at its time.

"Which team did he play for in 2003?" is answered by "In 2001 he moved to Porto", in which no number of the question
stands. So behind the lexical vectors of `mac_rag.nn.hashed_bm25`, a document has one more, with a place for each year,
and so has a question:

    c(d)_y = exp(-(y - last(d, y)) / decay)     a(x)_y = weight if y is the first year that x names, else 0

where last(d, y) is the last year up to y that d names. Their product adds weight exp(-(y - last(d, y)) / decay) to what
the document prior sees in the words of both. A question that names no year has zeros there.

Not part of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

_LEAST = 1 / 32  # numbers below are zeros, which banks need not keep


@dataclass(frozen=True)
class Years:
    """Which tokens are years, and how much a year counts.

    Attributes:
        of_tokens: the year of each token that is one, from `calendar`.
        continuing: tokens that make a number before them longer, such as "##7" in BERT's vocabulary.
        vocabulary: tokens in the vocabulary.
        calendar: the years that have a place, at most D.
        weight: how much a document counts that names the year of the question.
        decay: years before it behind which that has fallen to 1/e.
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
        use_years: False lets questions ask for no year, to measure the effect.
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
        # Whatever names no year goes to a place of its own behind them all, which is cut off.
        place, count = self.place[input_ids], len(self.years.calendar)
        place = place.where((place >= 0) & shown & ~continued, count)
        named = torch.zeros(len(input_ids), count + 1, dtype=torch.bool, device=input_ids.device)
        return named.scatter_(1, place, True)[:, :-1]

    def since(self, named: Tensor) -> Tensor:
        """Years that have passed in each year since the last one that is named, `[K, Y]`; infinite before the first."""
        year = torch.arange(named.shape[1], device=named.device, dtype=torch.float32)
        return year - torch.where(named, year, -torch.inf).cummax(1).values
