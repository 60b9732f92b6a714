"""The recency term of the document prior: of documents on the same subject, the newest that a question can mean counts.

The prior compares texts, and two versions of one text are equally near to a question about them. So the term takes from
a document's score for each newer one on the same subject:

    r(x, d) = -softplus(a) sum_d' [d' is newer than d] same(x, d, d')
    same(x, d, d') = sigmoid(alpha e^tau (cos(k_d, k_d') - 1) + gamma (s(x, d') - s(x, d)) + beta)

where k are the prior's keys of the documents, s the scores of the prior, and the sum goes over the documents that the
prior ranks first. a, alpha, beta and gamma are learned. The term is never positive: it can only take from a score.

A question may name a time. Then a document from after it is newer than no other. It takes nothing from the documents
that the question can mean, and neither do two such documents from each other, because the question asks for none of
them. A question that names no time asks for the newest.

Not part of the paper.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

# Documents of each question among which the newest is looked for. Those behind them weigh next to nothing in any case.
CANDIDATES = 64
_BEFORE_ALL = torch.iinfo(torch.int64).min


class Candidates(NamedTuple):
    """The documents that the prior ranks first for each of B questions.

    Attributes:
        scores: `[B, n]`, the prior's scores, descending; `-inf` for a document that a question may not see.
        keys: `[B, n, P]`, the part of their prior keys that compares summaries, of length 1.
        dates: `[B, n]`, int64, in microseconds since 1970.
    """

    scores: Tensor
    keys: Tensor
    dates: Tensor

    @classmethod
    def of_all(cls, parts: list[Candidates]) -> Candidates:
        """Those of all rows from those of several parts of them, which are at least one.

        Where scores are equal, those of the first part come first.
        """
        scores, keys, dates = (torch.cat(column, 1) for column in zip(*parts, strict=True))
        index = scores.sort(dim=1, descending=True, stable=True).indices[:, :CANDIDATES]
        return cls(scores.gather(1, index), _gathered(keys, index), dates.gather(1, index))


class RecencyTerm(nn.Module):
    """The term, with the numbers in it that are learned. It has no other weights, and banks know nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.tensor(5.0))  # a
        self.alike = nn.Parameter(torch.tensor(1.0))  # alpha
        self.bias = nn.Parameter(torch.tensor(3.0))  # beta
        self.about = nn.Parameter(torch.tensor(1.0))  # gamma

    def penalties(self, own: Candidates, among: Candidates, asked: Tensor | None, scale: Tensor) -> Tensor:
        """What is taken from the scores of documents, `[B, n]`, never positive.

        Args:
            own: the documents.
            among: those that may be newer, n' of them: the same, or where they are part of a bank, those of all of it.
            asked: `[B]`, int64, the last moment of the time that each question names; None if none names one.
            scale: e^tau of the prior.
        """
        ours, theirs = own.dates, among.dates
        if asked is not None:
            # After the time of a question all are equal, and before what can be meant.
            ours, theirs = (dates.where(dates <= asked[:, None], _BEFORE_ALL) for dates in (ours, theirs))
        seen, theirs_seen = own.scores.isfinite(), among.scores.isfinite()
        newer = seen[:, :, None] & theirs_seen[:, None] & (theirs[:, None] > ours[:, :, None])  # [B, n, n']
        cosines = own.keys @ among.keys.mT  # keys have length 1
        # Without the scores of what may not be seen: no gradient passes through inf - inf.
        gaps = among.scores.where(theirs_seen, 0.0)[:, None] - own.scores.where(seen, 0.0)[:, :, None]
        same = torch.sigmoid(self.alike * scale * (cosines - 1) + self.about * gaps + self.bias)
        # With fewer candidates in all of the bank, each is one of them.
        is_candidate = own.scores >= among.scores[:, -1:] if among.scores.shape[1] == CANDIDATES else None
        taken = functional.softplus(self.strength) * torch.where(newer, same, 0.0).sum(-1)
        return -taken if is_candidate is None else -torch.where(is_candidate, taken, 0.0)


class RankedFirst(NamedTuple):
    """The candidates among K rows, and where they are.

    Attributes:
        rows: `[B, n]`, their numbers.
        candidates: the candidates.
    """

    rows: Tensor
    candidates: Candidates

    @classmethod
    def among(cls, scores: Tensor, keys: Tensor, dates: Tensor) -> RankedFirst:
        """Those of all rows; of equal scores, the first rows.

        Args:
            scores: `[B, K]`, the prior's scores; `-inf` for rows that a question may not see.
            keys: `[K, P]`, or `[G, K, P]` where each run of B / G questions has rows of its own.
            dates: `[K]` or `[G, K]`.
        """
        count = min(CANDIDATES, scores.shape[1])
        # Sorted by number first: `topk` returns equal scores in any order, and sums would round in any order with it.
        index = scores.topk(count, 1).indices.sort(1).values
        order = scores.gather(1, index).sort(dim=1, descending=True, stable=True).indices
        index = index.gather(1, order)
        if keys.ndim == 3:
            run = torch.arange(len(scores), device=index.device)[:, None] // (len(scores) // len(keys))
            found = keys[run, index], dates[run, index]
        else:
            found = keys[index], dates[index]
        return cls(index, Candidates(scores.gather(1, index), *found))

    def added(self, scores: Tensor, penalties: Tensor) -> Tensor:
        """The scores `[B, K]` with the penalties `[B, n]` of the candidates."""
        return scores.scatter_add(1, self.rows, penalties.to(scores.dtype))


def _gathered(keys: Tensor, index: Tensor) -> Tensor:
    """`[B, n, P]` by `[B, m] -> [B, m, P]`."""
    found: Tensor = keys.gather(1, index[:, :, None].expand(-1, -1, keys.shape[-1]))
    return found
