"""Slots of phi*: several documents side by side, where one aggregation gives the T tokens of one blend.

A document prior that is sharp enough to find one document among thousands leaves the others no weight, so T tokens of
phi* say what the first document says. With S slots the bank is aggregated S times at once: slot j does not see the j
documents that the prior ranks first, and otherwise attends to the whole bank as ever. The first slot is what a network
without slots computes. Not part of the paper.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mac_rag.nn.cross_attention import weighed

_FAINTEST = 8.0  # largest log-ratio of two documents' probabilities that a mark tells


class MemorySlots(nn.Module):
    """Which documents each slot sees, and marks by which the LM tells slots apart.

    A slot's tokens carry a mark of its place, none for the first one, and another one times how much less probable the
    document prior holds the document that the slot sees first than the first slot's: so the LM can learn how far to
    trust it. Marks are zero unless `pipelines.initializers.slot_marks` fits them.

    Args:
        count: S.
        width: D.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.count = count
        self.places = nn.Parameter(torch.zeros(count - 1, width))
        self.faint = nn.Parameter(torch.zeros(width))
        # As Transformers scale embeddings: an optimiser's small steps would hardly move a mark beside memory tokens.
        self._scale = width**0.5

    def scores(self, scores: Tensor) -> Tensor:
        """The document prior's scores as each slot sees them.

        Args:
            scores: `[B, K]`; `-inf` for documents that a question may not see.

        Returns:
            `[B * S, K]`, the slots of one question after another. Slot j has `-inf` for the j documents with the
            highest scores; where there are no more than these, for all but the last of them.
        """
        seen = scores.isfinite().sum(1)
        by_slot = scores[:, None].repeat(1, self.count, 1)
        slot = torch.arange(self.count, device=scores.device)
        for rank, document in enumerate(self._first(scores).unbind(1)[: self.count - 1]):
            hidden = (slot > rank) & (rank < seen - 1)[:, None]
            place = document[:, None, None].expand(-1, self.count, 1)
            by_slot = by_slot.scatter(2, place, by_slot.gather(2, place).masked_fill(hidden[..., None], -torch.inf))
        return by_slot.flatten(0, 1)

    def shares(self, scores: Tensor, weight: Tensor) -> Tensor:
        """The prior's softmax share of the first document of each slot, `[B, S]`.

        Args:
            scores: `[B, K]`, of the document prior.
            weight: a scalar, how attention weighs them.
        """
        return self._of_slots(weighed(scores, weight).softmax(1), scores)

    def faintness(self, scores: Tensor) -> Tensor:
        """How much less probable each slot's first document is than the first slot's, as a log-ratio, `[B, S]`.

        Args:
            scores: `[B, K]`, of the document prior, whose softmax is the probabilities that it was trained to give.
        """
        of_slots = self._of_slots(scores, scores)
        return (of_slots[:, :1] - of_slots).clamp(max=_FAINTEST)

    def marked(self, tokens: Tensor, faintness: Tensor) -> Tensor:
        """Slots `[B * S, T, D]` with their marks, side by side `[B, S * T, D]`; `faintness` `[B, S]`."""
        places = torch.cat([self.places.new_zeros(1, self.places.shape[1]), self.places])
        marks = (places + faintness[..., None] * self.faint) * self._scale
        by_slot: Tensor = tokens.unflatten(0, (-1, self.count)) + marks[:, :, None]
        return by_slot.flatten(1, 2)

    def _of_slots(self, values: Tensor, scores: Tensor) -> Tensor:
        """Of values of all documents `[B, K]`, that of the document which each slot sees first, `[B, S]`."""
        seen = scores.isfinite().sum(1, keepdim=True)
        rank = torch.arange(self.count, device=scores.device).expand(len(scores), -1)
        return values.gather(1, self._first(scores)).gather(1, rank.minimum(seen - 1))

    def _first(self, scores: Tensor) -> Tensor:
        """The documents with the highest scores, `[B, min(S, K)]`."""
        return scores.topk(min(self.count, scores.shape[1])).indices
