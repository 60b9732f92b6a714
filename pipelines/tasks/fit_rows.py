"""Fitting the codebooks with which banks keep a model's memory tokens in few bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mac_rag.errors import ConfigError
from mac_rag.model import MACModel
from mac_rag.nn.product_quantizer import CODEWORDS, ProductQuantizer


def drawn(texts: Sequence[str], count: int, seed: int) -> list[str]:
    """At most `count` of these texts, drawn at random."""
    return random.Random(seed).sample(texts, min(count, len(texts)))


def fit_quantizer(model: MACModel, texts: Sequence[str], code_bytes: int, *, seed: int = 0) -> ProductQuantizer:
    """Fits codebooks to a model's memory tokens of some texts.

    A model with a sentence encoder keeps the first token of a row as it is: the document prior compares it.

    Args:
        model: the model.
        texts: representative documents.
        code_bytes: M, bytes of a token.
        seed: random seed.

    Raises:
        ConfigError: for too few texts, or where M does not divide the width of a token.
        DocumentError: for a text that the model cannot take.
    """
    rows = [row for text in texts for row in model.amortization.plan(text)]
    whole = int(model.config.sentence_encoder is not None)
    tokens = model.config.tokens - whole
    if tokens < 1 or len(rows) * tokens < CODEWORDS:
        raise ConfigError(
            f"{len(rows)} rows of {max(0, tokens)} tokens are too few to learn {CODEWORDS} codewords from; take more "
            "documents"
        )
    if model.base_lm.width % code_bytes:
        raise ConfigError(
            f"{code_bytes} bytes cannot share the {model.base_lm.width} numbers of a memory token evenly; take a "
            "divisor"
        )
    phi = model.amortize_rows(rows)[:, : model.config.tokens].cpu()
    return ProductQuantizer.fit(phi, code_bytes, fingerprint=model.fingerprint, whole=whole, seed=seed)
