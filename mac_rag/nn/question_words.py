"""The lexical vectors by which a question looks for documents: those of its words, and of the years before.

"Which team did he play for in 2003?" is answered by "In 2001 he moved to Porto", in which no number of the question
stands. So a question that names years also asks for years before them, the less the earlier they are (temporal query
expansion):

    u(x) = v(x) / |v(x)| + sum_y e(x, y) v(y),  e(x, y) = weight exp(-max(first - y, 0) / decay) for y <= last

where v are the lexical vectors of `mac_rag.nn.hashed_bm25`, `first` and `last` are the first and the last year that the
question names, and the sum goes over all years that are one token of the vocabulary. A question that names no year
stays as it is, and banks know nothing of any of this.

Not part of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mac_rag.nn.hashed_bm25 import HashedBM25


@dataclass(frozen=True)
class Years:
    """Which years a question asks for beside those that it names.

    Attributes:
        tokens: the token of each year that is one.
        continuing: tokens that make a number before them longer, such as "##7" in BERT's vocabulary.
        vocabulary: tokens in the vocabulary.
        weight: weight of a year that the question names.
        decay: years before the first of these, behind which the weight has fallen to 1/e.
    """

    tokens: dict[int, int]
    continuing: list[int]
    vocabulary: int
    weight: float
    decay: float


class QuestionWords(nn.Module):
    """What a question asks for in lexical vectors.

    Args:
        years: the years that it asks for beside those that it names; None for none.

    Attributes:
        use_years: False leaves the years out, to measure their effect.
    """

    def __init__(self, years: Years | None = None) -> None:
        super().__init__()
        self.years = years
        self.use_years = years is not None
        if years is None:
            return
        tokens, calendar = torch.tensor(list(years.tokens.values())), torch.tensor(list(years.tokens))
        year_of_token = torch.zeros(years.vocabulary, dtype=torch.int16)
        year_of_token[tokens] = calendar.to(torch.int16)
        continues = torch.zeros(years.vocabulary, dtype=torch.bool)
        continues[years.continuing] = True
        for name, table in (
            ("tokens", tokens),
            ("calendar", calendar.float()),
            ("year_of_token", year_of_token),
            ("continues", continues),
        ):
            self.register_buffer(name, table, persistent=False)
        self.tokens: Tensor
        self.calendar: Tensor
        self.year_of_token: Tensor
        self.continues: Tensor

    def forward(self, vectors: Tensor, input_ids: Tensor, attention_mask: Tensor, hashed: HashedBM25) -> Tensor:
        """u of B questions, `[B, R, D]`.

        Args:
            vectors: their own lexical vectors, `[B, R, D]`.
            input_ids, attention_mask: `[B, L]`.
            hashed: makes lexical vectors.
        """
        own = functional.normalize(vectors.flatten(1), dim=-1).view_as(vectors)
        if self.years is None or not self.use_years:
            return own
        weights = self.weights(*self.named(input_ids, attention_mask), self.years.weight, self.years.decay)
        return own + hashed.of_tokens(self.tokens.expand_as(weights), weights * self.rarity(hashed))

    def named(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the last year that each question names, float32 `[B]`; 0 where it names none."""
        shown = attention_mask.bool()
        continued = functional.pad(self.continues[input_ids] & shown, (0, 1))[:, 1:]
        years = self.year_of_token[input_ids].where(shown & ~continued, 0).float()
        last = years.amax(1)
        first = years.where(years > 0, torch.inf).amin(1)
        return first.where(last > 0, 0.0), last

    def weights(self, first: Tensor, last: Tensor, weight: float | Tensor, decay: float | Tensor) -> Tensor:
        """e of B questions and all Y years that are tokens, `[B, Y]`; see `named` for the first two arguments."""
        distance = (first[:, None] - self.calendar).clamp(min=0)
        return torch.where(self.calendar <= last[:, None], weight * torch.exp(-distance / decay), 0.0)

    def rarity(self, hashed: HashedBM25) -> Tensor:
        """What a year's token weighs in hashed BM25 beside its count, `[Y]`."""
        return hashed.rarity[self.tokens].sqrt()
