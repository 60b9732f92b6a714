"""Costs of an answer until its first token: tokens that the LM reads, and floating-point operations."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from mac_rag.engine import MACEngine
from mac_rag.lm.prompt import FittedPrompt

_SAMPLE = 8  # questions whose operations are counted


class Costs:
    """Counts the costs of an engine's answers; the counts are the same on every machine.

    The bank's keys and values count as projected already, as after some questions. Retrieval is not counted: BM25 does
    no matrix products, and a dense retriever's encoder is not the LM's.

    Args:
        engine: an engine that has adapted to its documents.
        questions: questions to come; the first 8 are the sample on which the memory's part is counted here.
    """

    def __init__(self, engine: MACEngine, questions: Sequence[str]) -> None:
        self._engine = engine
        self._sample = list(dict.fromkeys(questions))[:_SAMPLE]
        # An engine remembers the aggregate of a question. Spaces after a question make it new to the engine, and the
        # same to the encoder: the first time projects the rows that it attends to, the second one is counted.
        for question in self._sample:
            engine.aggregate([f"{question} "])
        total = sum(flops(partial(engine.aggregate, [f"{question}  "])) for question in self._sample)
        self._of_memory = total / len(self._sample)

    def measures(self, prompts: Sequence[FittedPrompt], weight: float | None) -> dict[str, float]:
        """The costs of a row with a memory weight, or without memory for None; means over its questions.

        Returns:
            `lm_tokens`, the tokens of prompts that the LM reads, twice for an ensemble, over all questions, and those
                of a memory in the prompt, over the sample; and `gflop`, billions of operations until the first token,
                over the sample.
        """
        ensemble = weight is not None and weight < 1  # of the LM with memory and without: it reads documents twice
        model = self._engine.model
        read = [len(model.ids_read(prompt, with_memory=weight is not None)) for prompt in prompts]
        twice = [2 if ensemble and prompt.contexts else 1 for prompt in prompts]
        tokens = sum(map(operator.mul, read, twice)) / len(prompts)
        sample = [prompt for prompt in prompts if prompt.question in self._sample][:_SAMPLE]
        operations = 0.0
        for prompt in sample:
            phi = None if weight is None else self._engine.aggregate([prompt.question])
            if phi is not None:
                tokens += model.memory_in_prompt(phi)[0] / len(sample)
            first_token = partial(model.generate, [prompt], modulation=phi, max_new_tokens=1, memory_weight=weight)
            operations += flops(first_token)
        mean = operations / len(sample) + (0.0 if weight is None else self._of_memory)
        return {"lm_tokens": tokens, "gflop": mean / 1e9}


def flops(compute: Callable[[], object]) -> int:
    """Floating-point operations of matrix products and attention in a computation, without gradients."""
    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    with torch.no_grad(), counter:
        compute()
    return counter.get_total_flops()


def _formulas() -> dict[Any, Any]:
    """Operations of what PyTorch does not count by itself: products by oneDNN, and a CPU's fused attention."""
    formulas = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _of_attention}
    products = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # see `mac_rag.nn.cpu_linear`
    return formulas if products is None else {**formulas, products: _of_linear}


def _of_attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (width + value[-1])


def _of_linear(inputs: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * math.prod(inputs) * weight[0]
