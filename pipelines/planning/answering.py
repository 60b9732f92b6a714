"""The memory of answering from a bank, by part of the model, and the bytes of a document in the bank."""

from __future__ import annotations

from dataclasses import dataclass

from mac_rag.config import AttentionConfig
from mac_rag.lm.devices import DTYPES
from mac_rag.model import MACModel
from pipelines.planning.activations import inner_width
from pipelines.planning.memory import Memory
from pipelines.planning.weights import AGGREGATION, BASE_LM, weights_by_part


@dataclass(frozen=True)
class Asking:
    """How a model is asked.

    Attributes:
        documents: documents in the bank, each of one chunk.
        questions: questions of a batch.
        context: tokens of documents, question and answer in front of the LM.
    """

    documents: int = 10_000
    questions: int = 1
    context: int = 2048


def row_bytes(model: MACModel, rows: str) -> int:
    """Bytes of a document in a bank on disk: its memory tokens and its summary, and at most so many of words.

    Args:
        model: a model without numbers.
        rows: `bf16` or `int8`.
    """
    tokens, width = model.config.tokens, model.base_lm.width
    phi = tokens * (2 * width if rows == "bf16" else width + 4)
    return phi + _summary_bytes(model) + _lexical_bytes(model, 2 if rows == "bf16" else 4)


def _summary_bytes(model: MACModel) -> int:
    """Of the key of the document prior, and of the longest key of each block and head."""
    sizes = model.config.aggregation
    return 4 * (sizes.prior_width + sizes.blocks * sizes.heads)


def _lexical_bytes(model: MACModel, number: int) -> int:
    """At most: the lexical vectors of a text have no more numbers than it has tokens, but for that of years."""
    lexical, width = model.config.hashed_bm25, model.base_lm.width
    if lexical is None:
        return 0
    numbers = min(lexical.vectors * width, model.amortization.max_tokens) + (lexical.years is not None) * width
    return numbers * (4 + number)


def answering_memory(model: MACModel, asking: Asking, attention: AttentionConfig | None = None) -> Memory:
    """The memory of a loaded checkpoint that answers a batch of questions.

    Args:
        model: the checkpoint's model without numbers (`pipelines.planning.empty_model`).
        asking: bank, batch and prompts.
        attention: how the engine attends to the bank; None for the defaults, by which at most 2 GiB of the bank's keys
            and values are kept.
    """
    attention = attention or AttentionConfig()
    sizes, config = model.config.aggregation, model.config
    number = DTYPES[attention.cache_dtype].itemsize
    keys_values = sizes.blocks * 2 * config.tokens * sizes.heads * sizes.head_width * number
    found = min(asking.documents * keys_values, attention.cache_bytes)
    summaries = asking.documents * (_summary_bytes(model) + _lexical_bytes(model, 4))
    shape, lm = model.base_lm.shape(config.modulation), model.base_lm.model.config
    rows = asking.questions * (1 if config.memory_weight == 1 else 2)
    positions = model.modulation.prefix_length + min(asking.context, model.context_window)
    of_lm = model.base_lm.dtype.itemsize
    cache = rows * positions * shape.layers * 2 * shape.kv_heads * shape.head_width * of_lm
    # Of one layer at a time: the states and what its feed-forward network computes; and the logits of the last token.
    working = rows * positions * (6 * lm.hidden_size + 3 * inner_width(lm)) * of_lm + rows * lm.vocab_size * 4
    parts = {part.name: {"weights": part.bytes} for part in weights_by_part(model)}
    parts[BASE_LM] |= {"keys and values": cache, "working memory": working}
    parts[AGGREGATION] |= {"bank": found + summaries}
    return Memory(parts)
