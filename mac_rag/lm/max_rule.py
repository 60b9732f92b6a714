"""Max-rule ensemble decoding: one answer from the LM with memory and the LM without."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor


class MaxRuleEnsemble(LogitsProcessor):
    """Combines two next-token distributions: `max(lambda p(. | d, x; phi*), (1 - lambda) p(. | d, x))`.

    This is the max rule of Kittler et al. (1998, "On Combining Classifiers"): for each token the more confident of two
    models counts. Where the retrieved text holds the answer, that is often the LM alone; where it does not, the LM with
    memory. Neither has to know which of the two it is.

    Args:
        weights: lambda of each of B questions, from 0 (the LM alone) to 1 (the LM with memory).
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = torch.tensor(weights, dtype=torch.float32)

    def of(self, questions: Tensor) -> MaxRuleEnsemble:
        """The ensemble of some of the B questions, by their numbers."""
        return MaxRuleEnsemble(self._weights[questions.cpu()].tolist())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Log-probabilities `[2 N, vocabulary]`, equal in both halves. They sum to 1, which beam search needs.

        Args:
            input_ids: not used.
            scores: logits `[2 N, vocabulary]`: N rows with memory, then the same rows without; N is B times the beams.
        """
        with_memory, without = scores.float().log_softmax(-1).chunk(2)
        weights = self._weights.repeat_interleave(len(with_memory) // len(self._weights)).to(scores.device)[:, None]
        highest = torch.maximum(with_memory + weights.log(), without + (1 - weights).log())
        return highest.log_softmax(-1).repeat(2, 1)
