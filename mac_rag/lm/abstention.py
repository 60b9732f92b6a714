"""When an LM that has learned to abstain abstains: where that is more probable than all answers together."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters

import torch
from torch import Tensor
from transformers import LogitsProcessor

from mac_rag.lm.prompt import PromptEncoder

_MAJORITY = 0.5


def abstention_beginning(prompts: PromptEncoder) -> list[int] | None:
    """The tokens of the abstention up to the first that tells it from answers; None without an abstention.

    Answers of other letters may begin with the same token, as that of a space.
    """
    text = prompts.format.abstention
    if text is None:
        return None
    ids = prompts.answer(text)
    others = [prompts.answer(letter) for letter in ascii_letters if letter.lower() != text.lstrip()[:1].lower()]
    count = 1
    while count < len(ids) and any(other[:count] == ids[:count] for other in others):
        count += 1
    return ids[:count]


class AbstainByMajority(LogitsProcessor):
    """Keeps answers from beginning as the abstention does, unless that has half of the probability.

    All abstentions begin alike, and answers in many ways. So the most probable token can be the abstention's though the
    LM holds it more probable that it knows an answer.

    Args:
        beginning: the tokens that the abstention begins with; the last of them tells it from answers.
        prompt_length: padded length of the prompts; answers begin behind them.
    """

    def __init__(self, beginning: Sequence[int], prompt_length: int) -> None:
        *self._common, self._token = beginning
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits `[B, vocabulary]` behind `input_ids` `[B, L]`."""
        said = input_ids[:, self._prompt_length :]
        if said.shape[1] != len(self._common):
            return scores
        elsewhere = (said != said.new_tensor(self._common)).any(1)
        stays = elsewhere | (scores.float().softmax(-1)[:, self._token] >= _MAJORITY)
        # Finite, since the abstention remains where nothing else may be said.
        lowest = torch.finfo(scores.dtype).min
        scores = scores.clone()
        scores[:, self._token] = torch.where(stays, scores[:, self._token], lowest)
        return scores
