"""The published implementation, rewritten for our networks as the baseline of benchmarks.

It differs from ours in four things only. It pads every document to 1,024 tokens. It repeats the bank for every
question, and computes normalisation, keys and values each time. Its LM generates without a key-value cache.
Each training step makes three more LM passes, only for its log. The results equal ours up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mac_rag.model import AmortizedModel
from mac_rag.model.text_encoder import TextEncoder
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.cross_attention import CrossAttentionBlock
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.modulation import Modulation
from pipelines.objective import Batch

PADDED = 1024


def encode(encoder: TextEncoder, texts: Sequence[str]) -> MemoryTokens:
    """Memory tokens `[K, T, D]` of K texts, each padded to 1,024 tokens."""
    ids = torch.zeros(len(texts), PADDED, dtype=torch.long, device=encoder.device)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        tokens = torch.tensor(encoder.ids(text), device=encoder.device)
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    encoded: MemoryTokens = encoder.network(ids, mask)
    return encoded


@torch.no_grad()
def adapt(model: AmortizedModel, documents: Sequence[str], batch_size: int) -> Tensor:
    """Memory tokens `[K, T, D]` of documents, encoded in batches in their given order."""
    parts = [
        encode(model.amortization, documents[first : first + batch_size])
        for first in range(0, len(documents), batch_size)
    ]
    return MemoryTokens.cat(parts).stacked()


def aggregate(model: AmortizedModel, questions: Sequence[str], phi: Tensor) -> Tensor:
    """phi* of each question `[B, T, D]`."""
    memory = MemoryTokens.split(phi, model.config.lexical_vectors)
    return attend(model.aggregation, encode(model.input_encoder, questions), memory)


def attend(network: AggregationNetwork, question: MemoryTokens, phi: MemoryTokens) -> Tensor:
    """phi* `[B, T, D]`, from a copy of the bank (`phi`) for each question, which every block normalises and projects
    again.
    """
    bank = phi.tokens.flatten(0, 1).repeat(len(question), 1, 1)  # [B, K * T, D]
    scores = None
    if network.prior is not None and network.use_prior:
        scores = network.prior.score(network.prior.queries(question), network.prior.keys(phi))
    tokens = question.tokens
    for block in network.blocks:
        assert isinstance(block, CrossAttentionBlock)
        normed = network.bank_norm(bank)
        query, keys, values = (
            layer(source).unflatten(-1, (block.heads, -1)).transpose(1, 2)
            for layer, source in (
                (block.to_query, block.norm(tokens)),
                (block.to_key, normed),
                (block.to_value, normed),
            )
        )
        logits = query @ keys.mT * query.shape[-1] ** -0.5  # [B, H, T, K * T]
        bias = None if scores is None else block.prior_bias(scores)
        if bias is not None:
            logits = logits + bias.repeat_interleave(phi.tokens.shape[1], -1)[:, :, None]
        attended = logits.softmax(-1) @ values
        tokens = tokens + block.to_out(attended.transpose(1, 2).flatten(2))
        tokens = tokens + block.feed_forward(tokens)
    return tokens


@torch.no_grad()
def answer(model: AmortizedModel, questions: Sequence[str], phi: Tensor) -> list[str]:
    """Greedy answers; every new token needs a pass over the whole sequence."""
    modulation = model.modulation(aggregate(model, questions, phi))
    lm = model.base_lm
    tokenizer = lm.tokenizer
    prompts = [lm.prompts.prompt(question) for question in questions]
    length = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    done = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(model.config.max_new_tokens):
        token = _next(lm.model, ids, mask, modulation).masked_fill(done, tokenizer.pad_token_id)
        done |= token == tokenizer.eos_token_id
        ids = torch.cat([ids, token[:, None]], 1)
        mask = torch.cat([mask, mask.new_ones(len(ids), 1)], 1)
        if done.all():
            break
    texts: list[str] = tokenizer.batch_decode(ids[:, length:], skip_special_tokens=True)
    return [text.strip() for text in texts]


def _next(lm: torch.nn.Module, ids: Tensor, mask: Tensor, modulation: Modulation) -> Tensor:
    prefix = modulation.prefix_length
    with modulation.attached(lm):
        logits = lm(
            input_ids=ids,
            attention_mask=torch.cat([mask.new_ones(len(ids), prefix), mask], 1),
            position_ids=(mask.cumsum(1) - 1).clamp(min=0) + prefix,
            past_key_values=modulation.cache(next(lm.parameters()).dtype),
        ).logits
    token: Tensor = logits[:, -1].argmax(-1)
    return token


def loss(model: AmortizedModel, batch: Batch) -> Tensor:
    """The loss of equation 2, after three LM passes without gradients for the log."""
    phi = encode(model.amortization, batch.documents).stacked()
    modulation = model.modulation(aggregate(model, batch.questions, phi))
    lm = model.base_lm
    prompts = [lm.prompts.prompt(question) for question in batch.questions]
    answers = [lm.prompts.answer(text) for text in batch.answers]
    with torch.no_grad():
        for logged in (None, modulation, model.modulation(phi[list(batch.gold)])):
            lm.answer_loss(prompts, answers, logged)
    return lm.answer_loss(prompts, answers, modulation).sum() / sum(map(len, answers))
