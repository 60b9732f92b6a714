"""The memory of what a training step keeps for its backward pass, estimated from the sizes of the networks.

A layer of width d whose feed-forward network is m wide keeps, for each token,

    e (8 d + 4 m) + 16 d bytes

where e is 2 in bf16 and 4 in fp32: inputs of the linear layers, queries, keys, values and what attention gives, what
the feed-forward network's product needs, and in fp32 the inputs of the norms. Attention that keeps its scores (T5)
adds 12 h n bytes for each token that attends to n others by h heads. Logits are kept once in their dtype and twice in
fp32. With gradient checkpointing a layer keeps its input, 4 d bytes, and one layer at a time is computed again.
Nothing is added for short-lived tensors of the backward pass. So this is an estimate; it was within a factor of 1.5 of
the measured peak of a step in `tests/pipelines/planning/test_activations.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mac_rag.model import MACModel
from mac_rag.nn.modulation import PrefixTuning
from pipelines.objective import LossWeights
from pipelines.planning.weights import AGGREGATION, AMORTIZATION, BASE_LM, INPUT, MODULATION

QUESTION_TOKENS, ANSWER_TOKENS = 32, 8  # of a prompt without documents, and of an answer
_SCORE = 12  # bytes of a score of attention: its softmax in fp32, the same in the dtype, and behind dropout


@dataclass(frozen=True)
class Step:
    """What one forward and backward pass reads.

    Attributes:
        documents: K.
        live: those of them that are amortized with gradients.
        questions: B.
        document_tokens: tokens of a document.
        context_tokens: tokens of the documents in front of a question.
        further_rows: documents of earlier batches that questions attend to as well.
        losses: weights of the terms.
        bf16: True for mixed precision.
        recompute: True for gradient checkpointing.
    """

    documents: int
    live: int
    questions: int
    document_tokens: int
    context_tokens: int
    further_rows: int
    losses: LossWeights
    bf16: bool
    recompute: bool = False

    def layers(self, count: int, width: int, layer: int) -> int:
        """Bytes that layers keep for each token.

        Args:
            count: number of layers.
            width: d.
            layer: bytes that one layer keeps where nothing is computed again.
        """
        return count * 4 * width + layer if self.recompute else count * layer

    def bytes_of(self, half: bool = False) -> int:
        """Bytes of a number that a network computes; `half` for one whose weights are in half precision."""
        return 2 if self.bf16 or half else 4


def layer_bytes(width: int, inner: int, number: int) -> int:
    """Bytes that a layer keeps for each token; the arguments are d, m and e of the formula."""
    return number * (8 * width + 4 * inner) + 16 * width


def inner_width(config: Any) -> int:
    """Width of the feed-forward networks of a transformers model."""
    names = ("intermediate_size", "d_ff", "n_inner", "ffn_dim")
    widths = [width for name in names if (width := getattr(config, name, None))]
    return int(widths[0] if widths else 4 * config.hidden_size)


def activations(model: MACModel, step: Step) -> dict[str, int]:
    """Bytes that one pass keeps in each part of a model.

    Args:
        model: a model without numbers, prepared for training.
        step: what the pass reads.
    """
    losses = step.losses
    aggregates = losses.answer or losses.alignment
    asks = aggregates or losses.contrastive
    found = {
        AMORTIZATION: step.live * _encoder(model.amortization.network, step.document_tokens, step),
        INPUT: step.questions * _encoder(model.input_encoder.network, QUESTION_TOKENS, step) if asks else 0,
        AGGREGATION: _aggregation(model, step) if aggregates else 0,
    }
    passes = [(step.questions, QUESTION_TOKENS + step.context_tokens, ANSWER_TOKENS)] if losses.answer else []
    passes += [(step.questions, QUESTION_TOKENS, ANSWER_TOKENS)] * (bool(losses.direct) + bool(losses.distillation))
    passes += [(step.documents, 1, step.document_tokens)] if losses.reconstruction else []
    found[BASE_LM] = sum(_lm(model, step, *each) for each in passes)
    found[MODULATION] = sum(rows for rows, _, _ in passes) * _modulation(model, step)
    return found


def _encoder(network: Any, tokens: int, step: Step) -> int:
    """Bytes of one text with gradients in an encoder."""
    config, count, number = network.backbone.config, len(network.queries), step.bytes_of()
    width, heads = config.hidden_size, config.num_attention_heads
    layer = layer_bytes(width, inner_width(config), number)
    width_out, inner = network.mlps.outer.shape[2], network.mlps.outer.shape[1]
    found = count * (4 * (3 * width + width_out) + 3 * number * inner)
    if hasattr(network, "to_key"):  # pooling: the distances of all words from each token's stretch, and three maps
        found += tokens * step.layers(config.num_hidden_layers, width, layer)
        return int(found + 12 * heads * count * tokens + tokens * (16 + 5 * number) * width)
    if getattr(config, "num_decoder_layers", None) and hasattr(network.backbone, "decoder"):
        decoder = layer + 4 * number * width + _SCORE * heads * (count + tokens)
        found += count * step.layers(config.num_decoder_layers, width, decoder)
        if any(parameter.requires_grad for parameter in network.backbone.encoder.parameters()):
            found += tokens * step.layers(config.num_layers, width, layer + _SCORE * heads * tokens)
        return int(found)
    read = tokens + count
    eager = _SCORE * heads * read if config.model_type == "t5" else 0
    return int(found + read * step.layers(config.num_hidden_layers, width, layer + eager))


def _aggregation(model: MACModel, step: Step) -> int:
    """Bank rows are projected in each block; a question's tokens pass through it, and its scores are not kept."""
    number, tokens, width = step.bytes_of(), model.config.tokens, model.base_lm.width
    sizes = model.config.aggregation
    heads = sizes.heads * sizes.head_width
    rows = step.documents + step.further_rows
    bank = rows * tokens * (8 * width + sizes.blocks * 2 * (number + 4) * heads)
    asked = (
        step.questions * tokens * sizes.blocks * (24 * width + number * (4 * heads + 3 * sizes.feed_forward * width))
    )
    return int(bank + asked)


def _lm(model: MACModel, step: Step, rows: int, prompt: int, answer: int) -> int:
    lm: Any = model.base_lm.model.config
    number = step.bytes_of(half=model.base_lm.dtype.itemsize == 2)
    layer = layer_bytes(lm.hidden_size, inner_width(lm), number)
    window = model.config.tokens_in_prompt + min(prompt + answer, model.context_window)
    layers = step.layers(lm.num_hidden_layers, lm.hidden_size, layer)
    return rows * int(window * layers + answer * lm.vocab_size * (number + 8))


def _modulation(model: MACModel, step: Step) -> int:
    """Bytes of one question's modulation: a prefix is kept as it is generated, turned, and in the LM's dtype."""
    network, tokens, width = model.modulation, model.config.tokens, model.base_lm.width
    if not isinstance(network, PrefixTuning):
        return tokens * 24 * width
    shape = network.shape
    numbers = network.prefix_length * shape.layers * 2 * shape.kv_heads * shape.head_width
    return tokens * 8 * width + numbers * (step.bytes_of() + (2 if network.sink is None else 3) * 4)
