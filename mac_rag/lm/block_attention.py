"""Block attention (parallel context windows): an LM reads each document by itself, and questions see all of them.

Each document follows a fixed opening, which is also the attention sink, and sees only the opening and itself. All
documents start at the same position, so a document's keys and values do not depend on the others, nor on their order.
A question starts after the longest of its documents and sees the opening, all documents, and itself. With one document
this is the LM's ordinary attention over the text.

`BlockAttentionLM` is for training: it packs many documents, and many questions, into one sequence each, with
gradients. Models read documents packed too (`packed_keys_values`), and answer through the LM's cache, each question
after its own documents (`mac_rag.nn.block_prefix`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mac_rag.errors import DocumentError, ModelLoadError
from mac_rag.lm.attention_sink import key_rotation
from mac_rag.nn.block_prefix import by_products
from mac_rag.nn.codec import KVCodec
from mac_rag.nn.dtypes import additive
from mac_rag.nn.modulation import has_limited_layers

# Tokens of a document up to which attention keeps its weights: 19 MB a layer for nine heads in bf16.
_LONGEST_BY_PRODUCTS = 1024
_BLOCKS = "mac_rag_blocks"  # name of this attention among transformers' own
# LMs whose attention is called as `_attention` is, and is no more than that: the tests compare each with its text.
_CLASSES = (
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM", "MistralForCausalLM",
    "MixtralForCausalLM", "Gemma3ForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM", "Olmo2ForCausalLM",
    "SmolLM3ForCausalLM", "GraniteForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM", "Glm4ForCausalLM",
    "HeliumForCausalLM", "NanoChatForCausalLM", "Exaone4ForCausalLM",
)  # fmt: skip


@dataclass(frozen=True)
class DocumentsKV:
    """Keys and values of an opening and of documents, in all layers.

    Attributes:
        opening: `[layers, 2, kv_heads, P, head_width]`; its keys are rotated.
        documents: `[layers, 2, kv_heads, L, head_width]`, one document after another; its keys are not rotated yet.
        lengths: number of tokens of each document; L is their sum.
    """

    opening: Tensor
    documents: Tensor
    lengths: tuple[int, ...]

    def coded(self, codec: KVCodec, bytes_per_token: int) -> DocumentsKV:
        """A copy whose documents were encoded to `bytes_per_token` and decoded; the opening stays as it is."""
        return replace(self, documents=codec.coded(self.documents, bytes_per_token))


class BlockAttentionLM:
    """An LM with block attention.

    Replaces the LM's attention in place. Called without blocks, the new attention computes the same as the old.

    Args:
        lm: a transformers causal LM of one of the classes that the tests check.
        opening: token ids of the opening.
        longest: largest number of tokens of a document.

    Attributes:
        shape: number of layers, number of heads of keys and values, and width of a head.

    Raises:
        ModelLoadError: for an LM of another class, and for an empty opening.
    """

    def __init__(self, lm: Any, opening: Sequence[int], *, longest: int) -> None:
        check_lm_class(lm)
        if not opening:
            raise ModelLoadError(
                "the opening is empty, but attention needs a token that every document sees; give at least one token"
            )
        self.lm = lm
        self.opening = list(opening)
        self.longest = longest
        lm.set_attn_implementation(_BLOCKS)
        with torch.autocast(lm.device.type, enabled=False):
            window = lm.config.max_position_embeddings
            self.rotation = key_rotation(lm, range(len(opening), len(opening) + longest), window)
        self.shape = (
            lm.config.num_hidden_layers,
            lm.config.num_key_value_heads,
            getattr(lm.config, "head_dim", None) or lm.config.hidden_size // lm.config.num_attention_heads,
        )

    def read(self, documents: Sequence[Sequence[int]]) -> DocumentsKV:
        """Reads documents, each after the opening, in one packed sequence.

        Raises:
            DocumentError: for a document longer than `longest`.
        """
        lengths = [len(document) for document in documents]
        if max(lengths, default=0) > self.longest:
            raise DocumentError(
                f"a document has {max(lengths):,} tokens, but the LM was set up for at most {self.longest:,}; split it"
            )
        start = len(self.opening)
        blocks = _DocumentBlocks(start, lengths, self.lm.device)
        self._check_reach(start + max(lengths, default=0))
        last = _read_packed(self.lm, self.opening, documents, blocks)
        keys, values = torch.cat(blocks.keys), torch.cat(blocks.values)  # [layers, kv_heads, P + L, head_width]
        if isinstance(self.lm.base_model.layers[-1], FSDPModule):
            # FSDP2 gathers a layer's weights for the backward pass when a gradient reaches the layer's output.
            # Gradients of keys and values reach the outputs of all layers but the last.
            values = values + 0 * last.last_hidden_state.sum()
        parts = keys.split([start, *lengths], 2)
        before = [self.rotation.inverse(part) for part in parts[1:]]
        return DocumentsKV(
            torch.stack([parts[0], values[:, :, :start]], 1),
            torch.stack([torch.cat(before or [keys[:, :, start:].float()], 2), values[:, :, start:].float()], 1),
            tuple(lengths),
        )

    def _check_reach(self, positions: int) -> None:
        """Refuses more positions than the layers with a sliding window see: blocks know no windows.

        Raises:
            DocumentError: names both numbers.
        """
        window = getattr(self.lm.config, "sliding_window", None)
        if has_limited_layers(self.lm.config) and positions > (window or 0):
            raise DocumentError(
                f"opening, document, question and answer take {positions:,} positions, but some layers of the LM see "
                f"{window or 0:,} only; give shorter documents (packs.document_tokens)"
            )

    def rotated(self, read: DocumentsKV) -> list[Tensor]:
        """Each document at its position after the opening: `[layers, 2, kv_heads, tokens, head_width]`, the LM's dtype.

        A document's result does not depend on the other documents.
        """
        dtype = read.opening.dtype
        parts = []
        for part in read.documents.split(read.lengths, 3):
            keys, values = part.unbind(1)
            parts.append(torch.stack([self.rotation(keys).to(dtype), values.to(dtype)], 1))
        return parts

    def answer_loss(
        self, read: DocumentsKV, questions: Sequence[tuple[Sequence[int], Sequence[int]]], bias: Tensor
    ) -> Tensor:
        """Mean negative log-likelihood of the tokens of all answers; arguments as for `answer_logits`."""
        labels = torch.tensor([token for _, answer in questions for token in answer], device=self.lm.device)
        return functional.cross_entropy(self.answer_logits(read, questions, bias), labels)

    def answer_logits(
        self, read: DocumentsKV, questions: Sequence[tuple[Sequence[int], Sequence[int]]], bias: Tensor
    ) -> Tensor:
        """The logits, in fp32, that predict each token of the answers, `[tokens of all answers, vocabulary]`.

        All questions see the same documents.

        Args:
            read: the documents.
            questions: token ids of each question and of its answer.
            bias: `[questions, documents]`, added to the attention logits of all tokens of a document.
        """
        device, start = self.lm.device, len(self.opening) + max(read.lengths, default=0)
        ids: list[int] = []
        positions: list[int] = []
        before_answer: list[int] = []  # indices of the tokens that an answer token follows
        for question, answer in questions:
            first = len(ids) + len(question) - 1
            before_answer += range(first, first + len(answer))
            tokens = [*question, *answer[:-1]]
            ids += tokens
            positions += range(start, start + len(tokens))
        lengths = [len(question) + len(answer) - 1 for question, answer in questions]
        prefix = torch.cat([read.opening, *self.rotated(read)], 3)
        blocks = _QuestionBlocks(prefix, len(self.opening), read.lengths, lengths, bias)
        self._check_reach(max(positions) + 1)
        logits: Tensor = self.lm(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            attention_mask=_no_mask(device),
            use_cache=False,
            logits_to_keep=torch.tensor(before_answer, device=device),
            blocks=blocks,
        ).logits[0]
        return logits.float()


@torch.no_grad()
def packed_keys_values(lm: Any, opening: Sequence[int], documents: Sequence[Sequence[int]]) -> list[Tensor]:
    """Keys and values of documents, each after the opening, in one packed sequence without padding.

    Args:
        lm: an LM that `has_plain_attention`, whose layers see all positions.
        opening: token ids of the opening.
        documents: token ids of each document.

    Returns:
        For each document `[layers, 2, kv_heads, n, head_width]`, keys rotated to its positions after the opening.
    """
    implementation = lm.config._attn_implementation
    blocks = _DocumentBlocks(len(opening), list(map(len, documents)), lm.device)
    lm.config._attn_implementation = _BLOCKS
    try:
        _read_packed(lm, opening, documents, blocks)
    finally:
        lm.config._attn_implementation = implementation
    parts = [torch.cat(some).split(blocks.lengths, 2)[1:] for some in (blocks.keys, blocks.values)]
    return [torch.stack(both, 1) for both in zip(*parts, strict=True)]


def _read_packed(lm: Any, opening: Sequence[int], documents: Sequence[Sequence[int]], blocks: _DocumentBlocks) -> Any:
    """The LM's pass over an opening and documents after it; the output of its base model."""
    start, device = len(opening), lm.device
    ids = [*opening, *(token for document in documents for token in document)]
    places = [*range(start), *(start + place for document in documents for place in range(len(document)))]
    return lm.base_model(
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([places], device=device),
        attention_mask=_no_mask(device),
        use_cache=False,
        blocks=blocks,
    )


def has_plain_attention(lm: Any) -> bool:
    """True if the tests have shown that an LM of this class computes attention as PyTorch does, and no more."""
    return type(lm).__name__ in _CLASSES


def check_lm_class(lm: Any) -> None:
    """Refuses an LM of a class for which no test shows that `BlockAttentionLM` is right.

    Raises:
        ModelLoadError: names the class.
    """
    if not has_plain_attention(lm):
        raise ModelLoadError(
            f"the LM is a {type(lm).__name__}, but reading through an LM's own keys and values is tested for "
            f"{', '.join(_CLASSES)} only; choose such an LM"
        )


class _DocumentBlocks:
    """Attention of an opening and documents in one sequence. Records the keys and values of each layer.

    Attributes:
        lengths: number of tokens of the opening and of each document.
        keys, values: `[1, kv_heads, P + L, head_width]` for each layer; keys are rotated.
    """

    def __init__(self, opening: int, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = [opening, *lengths]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._added: list[Tensor] = []  # to the logits of the opening and of each document
        self._masks = [
            torch.ones(length, opening + length, dtype=torch.bool, device=device).tril(opening) for length in lengths
        ]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.keys.append(key)
        self.values.append(value)
        if max(self.lengths) <= _LONGEST_BY_PRODUCTS:
            return self._by_products(query, key, value, scaling)
        groups = query.shape[1] // key.shape[1]
        heads = (query, _repeated(key, groups), _repeated(value, groups))
        queries, keys, values = (part.split(self.lengths, 2) for part in heads)
        out = [functional.scaled_dot_product_attention(queries[0], keys[0], values[0], is_causal=True, scale=scaling)]
        for q, k, v, mask in zip(queries[1:], keys[1:], values[1:], self._masks, strict=True):
            k, v = torch.cat([keys[0], k], 2), torch.cat([values[0], v], 2)
            out.append(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling))
        return torch.cat(out, 2)

    def _by_products(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """The same with the weights of a whole document in memory, which on a CPU takes less time."""
        opening, start = self.lengths[0], 0
        if not self._added:
            causal = torch.ones(opening, opening, dtype=torch.bool, device=query.device).tril()
            self._added = [additive(mask, query.dtype) for mask in (causal, *self._masks)]
        out: list[Tensor] = []
        for number, (length, added) in enumerate(zip(self.lengths, self._added, strict=True)):
            stop = start + length
            keys, values = key[:, :, start:stop], value[:, :, start:stop]
            if number:
                keys, values = (torch.cat([of[:, :, :opening], part], 2) for of, part in ((key, keys), (value, values)))
            out.append(by_products(query[:, :, start:stop], keys, values, added[None, None], scaling))
            start = stop
        return torch.cat(out, 2)


class _QuestionBlocks:
    """Attention of questions in one sequence: each sees a shared prefix, with a bias for each document, and itself.

    Args:
        prefix: `[layers, 2, kv_heads, P + L, head_width]`, opening and rotated documents.
        opening: P.
        documents, questions: number of tokens of each.
        bias: `[questions, documents]`.
    """

    def __init__(
        self, prefix: Tensor, opening: int, documents: Sequence[int], questions: Sequence[int], bias: Tensor
    ) -> None:
        self._layers = prefix.unbind(0)
        device = prefix.device
        question, document = _numbered(questions, device), _numbered(documents, device)
        own = (question[:, None] == question).tril()
        sink = torch.zeros(len(question), opening, device=device)
        self._mask = torch.cat([sink, bias[question][:, document], additive(own, torch.float32)], 1)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        keys, values = (torch.cat([before, own[0]], 1) for before, own in zip(self._layers[layer], (key, value)))
        heads = keys.shape[0]
        rows = query[0].unflatten(0, (heads, -1)).flatten(1, 2)
        scores = (rows @ keys.mT).unflatten(1, (-1, len(self._mask))).float() * scaling + self._mask
        weights = scores.softmax(-1).to(values.dtype).flatten(1, 2)
        out: Tensor = (weights @ values).unflatten(1, (-1, len(self._mask)))
        return out.flatten(0, 1)[None]


def _numbered(lengths: Sequence[int], device: torch.device) -> Tensor:
    """For each token the index of its part, given the lengths of the parts."""
    numbers = torch.arange(len(lengths), device=device)
    return numbers.repeat_interleave(torch.tensor(list(lengths), dtype=torch.int64, device=device))


def _repeated(heads: Tensor, groups: int) -> Tensor:
    return heads.repeat_interleave(groups, 1) if groups > 1 else heads


def _no_mask(device: torch.device) -> Tensor:
    """A mask of four dimensions, which transformers passes on unchanged: the blocks know which token sees which."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    blocks: _DocumentBlocks | _QuestionBlocks | None = None,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; without blocks, PyTorch's."""
    if blocks is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    if isinstance(blocks, _QuestionBlocks):
        out = blocks(module.layer_idx, query, key, value, scaling)
    else:
        out = blocks(query, key, value, scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(_BLOCKS, _attention)
AttentionMaskInterface.register(_BLOCKS, sdpa_mask)
