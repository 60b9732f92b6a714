"""Open-book validation: how well a plain LM answers from the documents in front of the question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mac_rag.data.metrics import best_over, exact_match, f1
from mac_rag.data.types import Question
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.prompt import PromptEncoder


@torch.no_grad()
def reading_scores(
    lm: Any,
    encoder: PromptEncoder,
    questions: Sequence[Question],
    contexts: Sequence[Sequence[str]],
    *,
    batch_size: int = 64,
    max_new_tokens: int = 16,
) -> dict[str, float]:
    """Mean exact match `em` and `f1` of greedy answers to `contexts[i] + questions[i]`, fitted to the LM's window."""
    base_lm = BaseLM(lm, encoder.tokenizer, encoder.format)
    room = base_lm.context_window - max_new_tokens
    prompts = [encoder.prompt(q.question, c, room) for q, c in zip(questions, contexts)]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    totals = {"em": 0.0, "f1": 0.0}
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        answers = base_lm.generate([prompts[i] for i in chosen], None, max_new_tokens=max_new_tokens)
        for answer, i in zip(answers, chosen, strict=True):
            for name, metric in (("em", exact_match), ("f1", f1)):
                totals[name] += best_over(metric, answer, questions[i].answers)
    return {name: total / len(questions) for name, total in totals.items()}
