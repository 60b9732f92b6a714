"""What general code must know of an LM's architecture; an architecture of our own registers itself here.

The LM of a checkpoint is any transformers model. Where architectures differ, code asks for these traits by the model's
type, and never which model it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Architecture:
    """Traits of an architecture; the defaults hold for any causal LM.

    Attributes:
        linear_head: True if the logits are one linear layer on the last states. Then only the logits of answer tokens
            are computed.
        takes_segments: True if `forward` takes `segment_ids` and `hidden`, which say what parts of a prompt see each
            other both ways; see `mac_rag.lm.prefix_lm`.
    """

    linear_head: bool = False
    takes_segments: bool = False

    def segment_arguments(self, segment_ids: Tensor, hidden: Tensor | None = None) -> dict[str, Tensor]:
        """Arguments of `forward` for the segments of prompts; none for an architecture without segments.

        Args:
            segment_ids: `[B, L]`.
            hidden: `[B, L]`; None where nothing is hidden.
        """
        if not self.takes_segments:
            return {}
        return {"segment_ids": segment_ids} if hidden is None else {"segment_ids": segment_ids, "hidden": hidden}


_ARCHITECTURES = {name: Architecture(linear_head=True) for name in ("gpt2", "llama", "mistral", "qwen2", "qwen3")}


def register(model_type: str, architecture: Architecture) -> None:
    """Makes the traits of an architecture known by its `model_type`."""
    _ARCHITECTURES[model_type] = architecture


def architecture_of(model: Any) -> Architecture:
    """The traits of a transformers model."""
    return _ARCHITECTURES.get(model.config.model_type, Architecture())
