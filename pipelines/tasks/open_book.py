"""Answers of a plain LM to any number of prompts, and their scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mac_rag.data.metrics import best_over, exact_match, f1
from mac_rag.data.types import Question
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.prompt import PromptEncoder
from mac_rag.progress import progress_bar

_ANSWER_TOKENS, _BATCH = 16, 64  # of a validation


@torch.no_grad()
def reading_scores(
    lm: Any, encoder: PromptEncoder, questions: Sequence[Question], contexts: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Scores of greedy answers to `contexts[i] + questions[i]`, fitted to the LM's window."""
    base_lm = BaseLM(lm, encoder.tokenizer, encoder.format)
    room = base_lm.context_window - _ANSWER_TOKENS
    prompts = [encoder.prompt(q.question, c, room) for q, c in zip(questions, contexts)]
    return mean_scores(generate(base_lm, prompts, max_new_tokens=_ANSWER_TOKENS, batch_size=_BATCH), questions)


def mean_scores(answers: Sequence[str], questions: Sequence[Question]) -> dict[str, float]:
    """Mean exact match `em` and `f1` of answers, each against the accepted answer that fits it best."""
    pairs = list(zip(answers, questions, strict=True))
    return {
        name: sum(best_over(metric, answer, question.answers) for answer, question in pairs) / len(pairs)
        for name, metric in (("em", exact_match), ("f1", f1))
    }


def generate(base_lm: BaseLM, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, batch_size: int) -> list[str]:
    """Answers prompts greedily, in batches of similar length; returns the answers in the order of the prompts."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    answers = [""] * len(prompts)
    with progress_bar("answer", len(prompts)) as bar:
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            texts = base_lm.generate([prompts[i] for i in batch], None, max_new_tokens=max_new_tokens)
            for index, text in zip(batch, texts, strict=True):
                answers[index] = text
            bar.advance(len(batch))
    return answers
