"""A prefix LM: attention is bidirectional within the prompt, and causal in the answer after it.

See Dong et al. (2019, "Unified Language Model Pre-training") and Raffel et al. (2020, section 3.2). The prompt of
documents and question is complete before the answer begins, so bidirectional attention leaks no answer token; and a
small encoder keeps its knowledge when it becomes a language model. Text without a prompt is modelled causally.
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

from mac_rag.lm.architectures import Architecture, register
from mac_rag.lm.prompt import MEMORY
from mac_rag.nn.dtypes import additive


class PrefixLMConfig(BertGenerationConfig):
    """BERT's sizes."""

    model_type = "mac-prefix-lm"


class PrefixLMBody(BertGenerationEncoder):
    """The LM without its head; amortization networks start from it.

    `forward` takes two more arguments than BERT's: `segment_ids` and `hidden`, both `[B, L]`; see `prefix_mask`.
    Without `segment_ids`, attention is causal.

    Attributes:
        bidirectional: True if attention without `segment_ids` is bidirectional, as in the backbone of a text encoder.
    """

    config_class = PrefixLMConfig
    bidirectional = False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        hidden: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Any:
        """As `BertGenerationEncoder.forward`, with `attention_mask` `[B, P + L]` for a cache of P tokens."""
        if segment_ids is None and self.bidirectional and input_ids is not None:
            segment_ids = torch.ones_like(input_ids)
        if segment_ids is not None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            attention_mask = prefix_mask(segment_ids, hidden, attention_mask, past)
            if self.config._attn_implementation == "eager":  # it adds its mask to the scores
                attention_mask = additive(attention_mask, self.dtype)
        return super().forward(input_ids, attention_mask, past_key_values=past_key_values, **options)


class PrefixLM(BertGenerationDecoder):
    """BERT with an LM head. Without `segment_ids`, generation treats its whole input as one prompt."""

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
        segment_ids: Tensor | None = None,
        hidden: Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> Any:
        """As `BertGenerationDecoder.forward`, with `segment_ids` and `hidden` of `PrefixLMBody`."""
        # Generation looks for these arguments in the signature.
        return super().forward(
            input_ids,
            attention_mask,
            position_ids=position_ids,
            segment_ids=segment_ids,
            hidden=hidden,
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
        segments = inputs.pop("segment_ids", None)
        if is_first_iteration:
            inputs["segment_ids"] = torch.ones_like(inputs["input_ids"]) if segments is None else segments
        return inputs


def prefix_mask(segment_ids: Tensor, hidden: Tensor | None, attention_mask: Tensor | None, past: int) -> Tensor:
    """Which token sees which, `[B, 1, L, P + L]`: its own segment, and the tokens before it; padding sees only itself.

    Args:
        segment_ids: `[B, L]`. Tokens of the same segment see each other both ways; a prompt may be one segment.
            0: tokens after the prompt, which see only the tokens before them. Documents in an earlier segment than the
            question's do not see the question. Below 0: tokens see their own segment and the cache only. `MEMORY` and
            above: tokens see their own segment, the cache, and segment 1, which holds the question.
        hidden: `[B, L]`, True for tokens that only their own segment sees; None if there are none.
        attention_mask: `[B, P + L]`, 0 for padding; None without padding.
        past: P, number of tokens in the cache.
    """
    length = segment_ids.shape[1]
    places = torch.arange(length, device=segment_ids.device)
    same_segment = (segment_ids[:, :, None] == segment_ids[:, None]) & (segment_ids[:, None] != 0)
    memory = segment_ids >= MEMORY
    before = (places[:, None] >= places) & ((segment_ids >= 0) & ~memory)[:, :, None]
    before |= memory[:, :, None] & (segment_ids == 1)[:, None]
    if hidden is not None:
        before = before & ~hidden[:, None]
    seen = torch.cat([same_segment.new_ones(len(segment_ids), length, past), before | same_segment], 2)
    if attention_mask is not None:
        seen &= attention_mask[:, None].bool()
    seen[:, places, past + places] = True  # a softmax over nothing is not a number
    return seen[:, None]


def repeated_positions(known: Tensor, count: int) -> Tensor:
    """Embeddings of `count` positions, `[count, D]`: positions beyond the known ones repeat the known ones.

    Each part of a long text is then read like a short text (Beltagy et al., 2020, "Longformer"). The first position,
    where a text starts, does not repeat.

    Args:
        known: `[N, D]`.
        count: number of positions.
    """
    places = torch.arange(count, device=known.device)
    places[1:] = 1 + (places[1:] - 1) % (len(known) - 1)
    return known[places]


AutoConfig.register(PrefixLMConfig.model_type, PrefixLMConfig)
AutoModel.register(PrefixLMConfig, PrefixLMBody)
AutoModelForCausalLM.register(PrefixLMConfig, PrefixLM)
register(PrefixLMConfig.model_type, Architecture(linear_head=True, takes_segments=True))
