"""Slots of phi*: several documents side by side, instead of the T tokens of one blend.

A document prior that is sharp enough to find one document among thousands leaves the others no weight, so the T tokens
of phi* hold only the first document. With S slots the bank is aggregated S times at once: slot j (from 0) does not see
the j documents that the prior ranks first, and otherwise attends to the whole bank as usual. Slot 0 equals the output
of a network without slots. Not part of the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from mac_rag.nn.cross_attention import weighed

# Looks at single slots: their tokens `[B, S, T, D]`, and a mask of those to look at, bool `[B, S]` -> the log-odds that
# a slot alone answers its question, `[B, S]`.
Look: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_FAINTEST = 8.0  # largest log-ratio of two documents' probabilities that a mark encodes


class FirstRows(NamedTuple):
    """The rows that the document prior ranks first for each of B questions, indexed within one part of a bank.

    Attributes:
        scores: `[B, S]`, the prior's scores, descending; `-inf` after the last row that a question may see.
        rows: `[B, S]`, their indices in the part; -1 for a row of another part, and for no row.
        seen: `[B]`, number of rows of all parts that a question may see.
    """

    scores: Tensor
    rows: Tensor
    seen: Tensor

    @classmethod
    def of_all(cls, parts: Sequence[FirstRows], own: int | None = None) -> FirstRows:
        """Merges those of all parts to those of the whole bank, indexed within part `own`; None for no part."""
        count = parts[0].scores.shape[1]
        scores, rows = torch.cat([part.scores for part in parts], 1), torch.cat([part.rows for part in parts], 1)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
        is_own = order // count == (-1 if own is None else own)
        rows = torch.where(is_own, rows.gather(1, order), -1)
        return cls(scores.gather(1, order), rows, torch.stack([part.seen for part in parts]).sum(0))


class RankedSlots(NamedTuple):
    """The slots of B questions in their order.

    Attributes:
        scores: `[B, S]`, descending: the prior's score of the document that each slot sees first, plus the result of a
            look, if there was one.
        left_out: bool `[B, S]`, True for slots that the LM does not read; they come last.
    """

    scores: Tensor
    left_out: Tensor


class MemorySlots(nn.Module):
    """Which documents each slot sees, and the marks by which the LM tells slots apart.

    Two vectors are added to a slot's tokens: a mark of its index (none for the first slot), and a mark times its
    faintness: how much less likely, by the document prior, its document is than the first slot's. From it the LM can
    learn how far to trust the slot. Marks are zero unless `pipelines.tasks.kv_regression` fits them.

    Args:
        count: S.
        width: D.
        cutoff: faintness by the prior beyond which a slot is left out, except in training; None leaves out none.
        reading_cutoff: the same for the scores after a look at each slot alone; None for no look.
    """

    def __init__(
        self, count: int, width: int, *, cutoff: float | None = None, reading_cutoff: float | None = None
    ) -> None:
        super().__init__()
        self.count = count
        self.cutoff = cutoff
        self.reading_cutoff = reading_cutoff
        self.places = nn.Parameter(torch.zeros(count - 1, width))
        self.faint = nn.Parameter(torch.zeros(width))
        # As Transformers scale embeddings: otherwise an optimiser's small steps would hardly change a mark's effect.
        self._scale = width**0.5

    def first(self, scores: Tensor) -> FirstRows:
        """The rows that the prior ranks first; there may be no rows.

        Args:
            scores: `[B, K]`; `-inf` for documents that a question may not see.
        """
        top = scores.topk(min(self.count, scores.shape[1]))
        missing = (0, self.count - top.values.shape[1])
        best = functional.pad(top.values, missing, value=-torch.inf)
        rows = functional.pad(top.indices, missing).masked_fill(best.isneginf(), -1)
        return FirstRows(best, rows, scores.isfinite().sum(1))

    def scores(self, scores: Tensor, first: FirstRows) -> Tensor:
        """The document prior's scores as each slot sees them.

        Args:
            scores: `[B, K]`, as for `first`.
            first: the rows that the prior ranks first in the whole bank, even if `scores` covers only a part of it.

        Returns:
            `[B * S, K]`, the slots of each question in a row. Slot j has `-inf` for the j documents with the highest
            scores; if there are no more than these, for all except the last of them.
        """
        by_slot = [scores]
        for rank, row in enumerate(first.rows.unbind(1)[: self.count - 1]):
            by_slot.append(_without_row(by_slot[-1], row, rank < first.seen - 1))
        return torch.stack(by_slot, 1).flatten(0, 1)

    def ranked(self, first: FirstRows) -> RankedSlots:
        """The slots in the prior's order; those beyond the cutoff are left out.

        Args:
            first: the rows that the prior ranks first.
        """
        scores = self._of_slots(first)
        return RankedSlots(scores, self._left_out(scores, self.cutoff))

    def looked_at(self, ranked: RankedSlots, tokens: Tensor, look: Look | None) -> tuple[RankedSlots, Tensor | None]:
        """The slots, reordered by the prior's scores plus the log-odds from a look at each slot alone.

        Args:
            ranked: the slots in the prior's order.
            tokens: `[B * S, T, D]`, without marks.
            look: looks at slots; None for no look.

        Returns:
            The slots, and `[B, S]` the former index of each; None if there was no look.
        """
        if look is None or self.reading_cutoff is None or self.training:
            return ranked, None
        heard = ~ranked.left_out
        wanted = heard & (heard.sum(1, keepdim=True) > 1)
        if not wanted.any():
            return ranked, None
        found = look(tokens.unflatten(0, (-1, self.count)), wanted).to(ranked.scores)
        scores = (ranked.scores + found).masked_fill(~heard, -torch.inf)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        return RankedSlots(scores, self._left_out(scores, self.reading_cutoff)), order

    def shares(self, ranked: RankedSlots, weight: Tensor) -> Tensor:
        """The softmax of the weighted scores of all slots, `[B, S]`; zero for slots that are left out.

        Args:
            ranked: the slots.
            weight: a scalar, the weight of the prior's scores in attention.
        """
        return weighed(ranked.scores, weight).masked_fill(ranked.left_out, -torch.inf).softmax(1)

    def faintness(self, scores: Tensor) -> Tensor:
        """How much less likely each slot's document is than the first slot's, as a log-ratio, `[B, S]`.

        The probabilities are the softmax of the prior's scores, as in its training.

        Args:
            scores: `[B, S]`, descending.
        """
        return (scores[:, :1] - scores).clamp(max=_FAINTEST)

    def marked(self, tokens: Tensor, ranked: RankedSlots) -> Tensor:
        """Slots `[B * S, T, D]` with their marks, joined to `[B, S * T, D]`.

        Slots that are left out are zero and come after all others (see `heard_slots`).
        """
        by_slot = tokens.unflatten(0, (-1, self.count))
        marks = self.faintness(ranked.scores).to(tokens)[..., None] * self.faint
        marks = torch.cat([marks[:, :1], marks[:, 1:] + self.places], 1)
        marked: Tensor = by_slot + (marks * self._scale)[:, :, None]
        return marked.masked_fill(ranked.left_out[..., None, None], 0.0).flatten(1, 2)

    def _left_out(self, scores: Tensor, cutoff: float | None) -> Tensor:
        """Which slots the LM does not read, bool `[B, S]`; `scores` as for `faintness`."""
        if cutoff is None or self.training:
            return torch.zeros_like(scores, dtype=torch.bool)
        return scores[:, :1] - scores > cutoff

    def _of_slots(self, first: FirstRows) -> Tensor:
        """The score of the document that each slot sees first, `[B, S]`."""
        rank = torch.arange(self.count, device=first.scores.device).expand(len(first.scores), -1)
        return first.scores.gather(1, rank.minimum(first.seen[:, None] - 1))


def heard_slots(phi: Tensor, tokens: int) -> Tensor:
    """Number of slots of phi* that the LM reads, `[B]`.

    Args:
        phi: `[B, S T, D]`; slots that are left out come last and are zero.
        tokens: T.
    """
    slots: Tensor = phi.unflatten(1, (-1, tokens))
    return slots.flatten(2).any(-1).sum(1)


def _without_row(scores: Tensor, row: Tensor, hides: Tensor) -> Tensor:
    """Scores `[B, K]` with `-inf` for one row of each question, `row` `[B]`, where `hides` `[B]` is True.

    Nothing is hidden from a question whose row is -1.
    """
    if not scores.shape[1]:
        return scores
    place, hidden = row.clamp(min=0)[:, None], (hides & (row >= 0))[:, None]
    return scores.scatter(1, place, scores.gather(1, place).masked_fill(hidden, -torch.inf))
