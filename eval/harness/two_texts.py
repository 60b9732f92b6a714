"""The max rule over two texts: a control for the second opinion that a memory is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mac_rag.lm.batching import pad_rows
from mac_rag.lm.decoding import ExtractiveDecoding, MaxRuleEnsemble, numeral_tokens
from mac_rag.lm.prompt import FittedPrompt
from mac_rag.model import MACModel


@torch.no_grad()
def answers_from_two_texts(
    model: MACModel, first: Sequence[FittedPrompt], second: Sequence[FittedPrompt], weight: float = 0.5
) -> list[str]:
    """Greedy answers without memory, where of two prompts the more confident one chooses each token.

    Args:
        model: the model, whose LM alone answers.
        first, second: B prompts each: the same questions behind one text and behind another.
        weight: lambda, the weight of the first.
    """
    lm, prompts = model.base_lm, [*first, *second]
    ids, mask = pad_rows([prompt.ids for prompt in prompts], lm.tokenizer.pad_token_id, lm.device, "left")
    processors: list[ExtractiveDecoding | MaxRuleEnsemble] = [MaxRuleEnsemble([weight] * len(first))]
    sources = model.span_sources(prompts)
    if sources is not None:
        extractive = ExtractiveDecoding(
            sources, prompt_length=ids.shape[1], end_tokens=lm.end_tokens, numerals=numeral_tokens(lm.tokenizer)
        )
        processors.insert(0, extractive)
    output = lm.model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=model.config.max_new_tokens,
        do_sample=False,
        logits_processor=processors,
        pad_token_id=lm.tokenizer.pad_token_id,
        eos_token_id=lm.end_tokens,
    )
    answers = output[: len(first), ids.shape[1] :]
    texts: list[str] = lm.tokenizer.batch_decode(answers, skip_special_tokens=True)
    return [text.strip() for text in texts]
