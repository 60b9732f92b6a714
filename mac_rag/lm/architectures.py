"""Traits of LM architectures that general code depends on. Our own architectures register theirs here.

The LM of a checkpoint can be any transformers model. Where architectures differ, code looks up these traits by the
model's type; it never asks which model it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache

from mac_rag.config import PromptFormat
from mac_rag.errors import ModelLoadError


def _kv_heads(config: Any) -> int:
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads


@dataclass(frozen=True)
class Architecture:
    """Traits of an architecture; the defaults hold for any causal LM.

    Attributes:
        linear_head: True if the logits are one linear layer on the last states. Then only the logits of answer tokens
            are computed.
        takes_segments: True if `forward` takes `segment_ids` and `hidden`, which say which parts of a prompt see each
            other both ways; see `mac_rag.lm.prefix_lm`.
        kv_heads: function from the LM's configuration to the number of heads in a layer's key-value cache.
    """

    linear_head: bool = False
    takes_segments: bool = False
    kv_heads: Callable[[Any], int] = _kv_heads

    def segment_arguments(self, segment_ids: Tensor, hidden: Tensor | None = None) -> dict[str, Tensor]:
        """Arguments of `forward` for the segments of prompts; empty for an architecture without segments.

        Args:
            segment_ids: `[B, L]`.
            hidden: `[B, L]`; None if no token is hidden.
        """
        if not self.takes_segments:
            return {}
        return {"segment_ids": segment_ids} if hidden is None else {"segment_ids": segment_ids, "hidden": hidden}

    def check_format(self, prompt_format: PromptFormat) -> None:
        """Raises ModelLoadError for a prompt format that an LM of this architecture cannot read."""
        if prompt_format.parallel_documents and not self.takes_segments:
            raise ModelLoadError(
                "prompt.parallel_documents is true, but only an LM whose attention takes segments reads documents in "
                "parallel; leave it out"
            )


_ARCHITECTURES = {name: Architecture(linear_head=True) for name in ("gpt2", "llama", "mistral", "qwen2", "qwen3")}


def _falcon_kv_heads(config: Any) -> int:
    heads: int = config.num_attention_heads
    if config.new_decoder_architecture:
        return heads  # its cache holds the keys and values after they are repeated for all heads
    return 1 if config.multi_query else heads


_ARCHITECTURES["falcon"] = Architecture(kv_heads=_falcon_kv_heads)


def check_modulation(config: Any, kind: str) -> None:
    """Refuses an LM that cannot carry a modulation. Reads the LM's configuration only, no weights.

    Args:
        config: the LM's transformers configuration.
        kind: `prefix`, `lora`, `film` or `prompt`; or `own-kv` for a memory of the LM's own keys and values.

    Raises:
        ModelLoadError: for such an LM; the message names the reason and the modulation that works.
    """
    name = config.model_type
    if config.get_text_config() is not config:
        raise ModelLoadError(f"{name} is more than a text model; give the folder of its text model alone")
    lm_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if lm_class is None:
        return  # loading reports that it is no causal LM
    if "past_key_values" not in inspect.signature(lm_class.forward).parameters:
        raise ModelLoadError(
            f"{name} keeps its state in a cache of its own and has no keys and values (a state-space or recurrent LM), "
            "so no modulation works with it; give an LM with attention"
        )
    if getattr(config, "max_position_embeddings", None) is None:
        raise ModelLoadError(
            f"the configuration of {name} does not say how many positions it has (max_position_embeddings), so no "
            "prompt can be fitted to it; give an LM whose configuration does"
        )
    if kind == "prompt" and not _of_type(name).takes_segments:
        raise ModelLoadError(
            f"{name} cannot read a memory as a part of its prompt: its attention takes no segments, so the memory "
            "tokens before the question would not see it; set modulation.kind to prefix"
        )
    reason = _against_prefix(config, lm_class) if kind in ("prefix", "own-kv") else None
    if reason is None and kind == "own-kv" and getattr(config, "alibi", False):
        reason = "it counts the distance of tokens in its attention mask (ALiBi), where parallel documents have none"
    if reason is None and kind == "own-kv" and getattr(config, "attention_chunk_size", None):
        reason = "some of its layers attend within chunks of a text, which parallel documents do not share"
    if reason is not None and kind == "own-kv":
        raise ModelLoadError(f"{name} cannot remember by its own keys and values: {reason}; take another LM")
    if reason is not None:
        raise ModelLoadError(f"{name} cannot carry a prefix: {reason}; set modulation.kind to lora or film")


def _against_prefix(config: Any, lm_class: Any) -> str | None:
    """Why an LM cannot take a prefix of keys and values in every layer; None if it can."""
    if lm_class._is_stateful or any(DynamicCache(config=config).is_linear):
        return "some of its layers are state-space layers or convolutions, which no keys and values reach"
    if getattr(config, "kv_lora_rank", None):
        return "its keys and values differ in width (multi-head latent attention)"
    if getattr(config, "num_kv_shared_layers", None) is not None:
        return "its layers share keys and values, or differ in their widths"
    return None


def register(model_type: str, architecture: Architecture) -> None:
    """Registers the traits of an architecture under its `model_type`."""
    _ARCHITECTURES[model_type] = architecture


def architecture_of(model: Any) -> Architecture:
    """The traits of a transformers model."""
    return _of_type(model.config.model_type)


def _of_type(model_type: str) -> Architecture:
    return _ARCHITECTURES.get(model_type, Architecture())
