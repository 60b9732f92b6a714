"""A prefix LM: the words of a prompt see each other both ways, and what is written behind them sees what was before.

(Dong et al., 2019, "Unified Language Model Pre-training"; Raffel et al., 2020, section 3.2.) A prompt of documents and
a question is there as a whole before the answer begins, so nothing is given away, and a small encoder keeps what it
knows when it becomes a language model. Plain text, which has no prompt, it models as a causal LM does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BertGenerationConfig,
    BertGenerationDecoder,
    BertGenerationEncoder,
)


class PrefixLMConfig(BertGenerationConfig):
    """BERT's sizes."""

    model_type = "mac-prefix-lm"


class PrefixLMBody(BertGenerationEncoder):
    """The LM without its head, as an amortization network starts from it.

    `forward` takes one argument more than BERT's: `parts` `[B, L]`, numbers that say which tokens are one part of a
    prompt; see `prefix_mask`. Without them, attention is causal.

    Attributes:
        bidirectional: True if texts without `parts` are read both ways, as the backbone of a text encoder reads them.
    """

    config_class = PrefixLMConfig
    bidirectional = False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        parts: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Any:
        """As `BertGenerationEncoder.forward`, with `attention_mask` `[B, P + L]`, P what the cache holds."""
        if parts is None and self.bidirectional and input_ids is not None:
            parts = torch.ones_like(input_ids)
        if parts is not None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            attention_mask = prefix_mask(parts, attention_mask, past)
        return super().forward(input_ids, attention_mask, past_key_values=past_key_values, **options)


class PrefixLM(BertGenerationDecoder):
    """BERT with an LM's head. In generation all that is given is one prompt."""

    config_class = PrefixLMConfig

    def __init__(self, config: PrefixLMConfig) -> None:
        super().__init__(config)
        self.bert = PrefixLMBody(config)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        parts: Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> Any:
        """As `BertGenerationDecoder.forward`, with `PrefixLMBody`'s `parts`."""
        # These arguments are named because generation asks the signature for them.
        return super().forward(
            input_ids,
            attention_mask,
            position_ids=position_ids,
            parts=parts,
            past_key_values=past_key_values,
            logits_to_keep=logits_to_keep,
            **options,
        )

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, is_first_iteration: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        causal: Any = super()
        inputs: dict[str, Any] = causal.prepare_inputs_for_generation(
            input_ids, is_first_iteration=is_first_iteration, **kwargs
        )
        if is_first_iteration:
            inputs["parts"] = torch.ones_like(inputs["input_ids"])
        return inputs


def parts_argument(model: object, parts: Tensor) -> dict[str, Tensor]:
    """The argument that tells a prefix LM, or its body, the parts of its prompts `[B, L]`; other models have none."""
    return {"parts": parts} if isinstance(model, PrefixLM | PrefixLMBody) else {}


def prefix_mask(parts: Tensor, attention_mask: Tensor | None, past: int) -> Tensor:
    """Which token may see which, `[B, 1, L, P + L]`: its part of the prompt and what was before; padding only itself.

    Args:
        parts: `[B, L]`, the same number for tokens of a prompt that see each other both ways, 0 for those behind it.
            A prompt may be one part; documents in a part before the question's do not know what is asked. What has
            the number's negative belongs to that part, too, but nothing after it sees it.
        attention_mask: `[B, P + L]`, 0 for padding; None where there is none.
        past: P, tokens that the cache holds.
    """
    batch, length = parts.shape
    places = torch.arange(length, device=parts.device)
    together = (parts[:, :, None].abs() == parts[:, None].abs()) & (parts[:, None] != 0)
    seen = (places[:, None] >= places) & (parts[:, None] >= 0) | together
    seen = torch.cat([seen.new_ones(batch, length, past), seen], 2)
    if attention_mask is not None:
        seen &= attention_mask[:, None].bool()
    seen[:, places, past + places] = True  # a softmax over nothing is not a number
    return seen[:, None]


AutoConfig.register(PrefixLMConfig.model_type, PrefixLMConfig)
AutoModel.register(PrefixLMConfig, PrefixLMBody)
AutoModelForCausalLM.register(PrefixLMConfig, PrefixLM)
