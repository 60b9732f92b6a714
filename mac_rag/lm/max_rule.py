"""Two readings of one question, with memory and without, and one answer from both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor


class SurerReading(LogitsProcessor):
    """Token by token the surer of two readings: `max(lambda p(. | d, x; phi*), (1 - lambda) p(. | d, x))`.

    (Kittler et al., 1998, "On Combining Classifiers": the max rule.) Where the retrieved text answers, the LM alone is
    often the surer of the two, and where it does not, memory; neither has to know which it is.

    Args:
        weights: lambda of each of B questions, from 0, all without memory, to 1, all with it.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = torch.tensor(weights, dtype=torch.float32)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Log-probabilities, scaled to sum to 1 for the sake of beams, the same for both halves of the rows.

        Args:
            input_ids: not used.
            scores: logits `[2 N, vocabulary]`: N rows with memory, then the same without; N is B times the beams.
        """
        with_memory, without = scores.float().log_softmax(-1).chunk(2)
        weights = self._weights.repeat_interleave(len(with_memory) // len(self._weights)).to(scores.device)[:, None]
        surer = torch.maximum(with_memory + weights.log(), without + (1 - weights).log())
        return surer.log_softmax(-1).repeat(2, 1)
