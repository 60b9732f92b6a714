"""Models that come with an installed package and not from the Hub, by the name that configurations give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mac_rag.lm import minilm


@dataclass(frozen=True)
class PackagedModel:
    """How to load one of them.

    Attributes:
        lm: makes a causal LM of its weights.
        backbone: makes a text encoder's backbone of its weights.
        tokenizer: makes their tokenizer.
        writes: False if the LM has its weights from an encoder and has not learned to write.
    """

    lm: Callable[[], Any]
    backbone: Callable[[], Any]
    tokenizer: Callable[[], Any]
    writes: bool


PACKAGED = {
    "minilm": PackagedModel(
        lm=partial(minilm.minilm_lm, minilm.POSITIONS),
        backbone=partial(minilm.minilm_encoder, minilm.POSITIONS),
        tokenizer=minilm.minilm_tokenizer,
        writes=False,
    )
}
