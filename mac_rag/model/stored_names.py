"""Names that checkpoints and fingerprints have kept since their first version, whatever the code calls things today.

Checkpoints on disk, and the banks that belong to them by fingerprint, must outlive a renaming. So weights are saved,
loaded and hashed under the names of this table, and the configuration is hashed under its first fields.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from mac_rag.config import CUTOFFS, AggregationConfig, MACConfig

# Part of an encoder -> its name in checkpoints.
_STORED_PARTS = {"sentence_encoder": "index", "hashed_bm25": "words"}
_ENCODERS = ("amortization.network.", "input_encoder.network.")
# Parts that both encoders share and no training changes, as checkpoints name them.
FROZEN = tuple(f"amortization.network.{part}." for part in _STORED_PARTS.values())
# Weights of which no bank knows: the recency term reads dates and prior keys, which every bank has. Like its setting,
# they are not part of the fingerprint, so a model that learns the term later reads its old banks.
BESIDE_BANKS = ("aggregation.recency.",)
SENTENCE_ENCODER_FOLDER = _STORED_PARTS["sentence_encoder"]  # of its architecture, in a checkpoint


def stored_name(name: str) -> str:
    """The name in a checkpoint of a parameter of `MACModel`."""
    for encoder in _ENCODERS:
        part, dot, rest = name.removeprefix(encoder).partition(".")
        if name.startswith(encoder) and part in _STORED_PARTS:
            return f"{encoder}{_STORED_PARTS[part]}{dot}{rest}"
    return name


class _Index(BaseModel):
    """Sentence encoder and hashed BM25 as one, which they were at first."""

    name: str | None
    revision: str | None
    embeddings: str
    words: int
    words_weight: float
    years_decay: float | None


class _FingerprintFields(BaseModel):
    index: _Index | None
    tokens: int
    aggregation: AggregationConfig
    attention_sink: bool


def fingerprint_fields(config: MACConfig) -> str:
    """JSON of what the configuration adds to a model's fingerprint; new fields with neutral values do not change it."""
    encoder, lexical, index = config.sentence_encoder, config.hashed_bm25, None
    if lexical is not None:
        index = _Index(
            name=None if encoder is None else encoder.name,
            revision=None if encoder is None else encoder.revision,
            embeddings="own" if encoder is None else encoder.embeddings,
            words=lexical.vectors,
            words_weight=lexical.weight,
            years_decay=None if lexical.years is None else lexical.years.decay,
        )
    fields = _FingerprintFields(
        index=index,
        tokens=config.tokens,
        aggregation=config.aggregation,
        attention_sink=config.modulation.attention_sink,
    )
    neutral = {"index": None, "attention_sink": False}
    left_out: dict[str, Any] = {name: True for name, value in neutral.items() if getattr(fields, name) == value}
    unused = {name for name, value in (("slots", 1), ("hops", False)) if getattr(fields.aggregation, name) == value}
    left_out["aggregation"] = {"recency", *CUTOFFS} | unused
    if index is not None and index.years_decay is None:
        left_out["index"] = {"years_decay"}
    return fields.model_dump_json(exclude=left_out)
