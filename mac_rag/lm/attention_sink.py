"""The attention sink of an LM: what it computes of the tokens with which its texts begin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mac_rag.config import ModulationConfig
from mac_rag.lm.base_lm import BaseLM
from mac_rag.lm.key_rotation import key_rotation
from mac_rag.nn.attention_sink import AttentionSink, KeyRotation


def make_attention_sink(lm: BaseLM, slots: int, window: int | None) -> AttentionSink:
    """The sink of an LM, for so many generated prefix positions behind it.

    Args:
        lm: the LM.
        slots: P, generated positions.
        window: largest number of tokens behind the prefix; None for all positions of the LM.

    Raises:
        ModelLoadError: as `key_rotation`.
    """
    if lm.device.type == "meta":
        return _shapes_of_sink(lm, slots)
    keys_values = sink_keys_values(lm)
    first = keys_values.shape[3]
    positions = range(first, first + slots)
    longest = lm.context_window if window is None else window + positions.stop
    return AttentionSink(keys_values, key_rotation(lm.model, positions, longest))


def _shapes_of_sink(lm: BaseLM, slots: int) -> AttentionSink:
    """The sink of an LM without weights, which has shapes alone."""
    shape = lm.shape(ModulationConfig())
    with torch.device("meta"):
        keys_values = torch.empty(shape.layers, 2, shape.kv_heads, len(first_tokens(lm)), shape.head_width)
        cos, sin = torch.empty(2, shape.layers, slots, shape.head_width)
        partner = torch.empty(shape.layers, shape.head_width, dtype=torch.long)
    return AttentionSink(keys_values, KeyRotation(cos, sin, partner))


def sink_keys_values(lm: BaseLM) -> Tensor:
    """What the LM computes of its first tokens in evaluation mode, `[layers, 2, kv_heads, S, head_width]` in fp32."""
    training = lm.model.training
    lm.model.eval()
    keys_values = lm.keys_values(first_tokens(lm)).float()
    lm.model.train(training)
    return keys_values


def first_tokens(lm: BaseLM) -> Sequence[int]:
    """Ids of the S tokens with which the LM's texts begin.

    They are those that its tokenizer puts in front of a text. Where there are none, it is the token of the text's
    beginning or else of its end, which has stood between texts in pretraining.
    """
    tokenizer = lm.prompts.tokenizer
    if lm.prompts.start:
        return lm.prompts.start
    return [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id]
