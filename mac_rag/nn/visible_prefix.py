"""Layers that attend to a window of the text only: there, too, a prefix of keys and values stays visible.

A sliding window counts the distance from a token to the prefix, and behind a prompt longer than the window the prefix
would be gone. So the LM gets masks that say: the window, or the prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_masks_for_generate

_LIMITED = {"sliding_attention", "chunked_attention"}


def has_limited_layers(config: Any) -> bool:
    """True if some layers of an LM attend to a part of the text only.

    Args:
        config: the LM's transformers configuration.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return not _LIMITED.isdisjoint(kinds)
    return bool(getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None))


@contextmanager
def visible_prefix(lm: Any, length: int) -> Iterator[None]:
    """Keeps the first `length` positions of the cache visible in every layer while the context lasts.

    Args:
        lm: a transformers causal LM. Its calls take an attention mask `[B, P + L]`.
        length: P.
    """
    if not has_limited_layers(lm.config):
        yield
        return
    dtype = lm.get_input_embeddings().weight.dtype

    def in_prefix(_batch: Tensor, _head: Tensor, _query: Tensor, key: Tensor) -> Tensor:
        return key < length

    def hook(body: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = named["input_ids"]
        masks = create_masks_for_generate(
            config=body.config,
            inputs_embeds=torch.empty(*ids.shape, 0, dtype=dtype, device=ids.device),  # for its sizes only
            attention_mask=named.get("attention_mask"),  # generation leaves out a mask that is all ones
            past_key_values=named["past_key_values"],
            or_mask_function=in_prefix,
        )
        return arguments, {**named, "attention_mask": masks}

    handle = lm.base_model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
