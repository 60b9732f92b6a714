"""Two readings of one question, with memory and without, and one answer from both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor


class Interpolation(LogitsProcessor):
    """`lambda p(. | d, x; phi*) + (1 - lambda) p(. | d, x)`, token by token.

    (Khandelwal et al., 2020, "Generalization through Memorization": how kNN-LM joins what a memory and an LM say.)
    Where the retrieved text answers, the LM alone is often the surer of the two, and where it does not, memory; so the
    surer one decides, and neither has to know which it is.

    Args:
        shares: lambda of each of B questions, above 0 and at most 1.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = torch.tensor(shares, dtype=torch.float32)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Log-probabilities, the same for both halves of the rows.

        Args:
            input_ids: not used.
            scores: logits `[2 N, vocabulary]`: N rows with memory, then the same without; N is B times the beams.
        """
        with_memory, without = scores.float().log_softmax(-1).chunk(2)
        shares = self._shares.repeat_interleave(len(with_memory) // len(self._shares)).to(scores.device)[:, None]
        mixed = torch.logaddexp(with_memory + shares.log(), without + (1 - shares).log())
        return mixed.repeat(2, 1)
