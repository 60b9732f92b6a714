"""A prefix of keys and values that an LM has computed itself: an opening, and after it documents in parallel.

Each document's keys and values are those of its text after the opening. All documents start at the same position, none
sees another, and their order does not matter. The text that follows starts after the longest document and sees all of
them, with a bias on the attention logits of each document's tokens. With one document this is the LM's own attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mac_rag.nn.growing_cache import GrowingLayer, with_spare
from mac_rag.nn.modulation import Modulation, has_limited_layers

_GROUPED = "mac_rag_grouped"  # name of this attention among transformers' own
_MOST_SCORES = 1 << 26  # attention logits of one layer that are in memory at a time
_FEW_QUERIES = 64  # queries of a group; beyond, it takes longer to transpose their logits than the keys


class BlockPrefix(Modulation):
    """Opening and documents before each of B rows. Attention stays what it is in the LM: causal, by positions.

    Args:
        opening: `[layers, 2, kv_heads, P, head_width]`, at positions 0 to P - 1; the same for all rows.
        documents: for each row its documents, `[layers, 2, kv_heads, n, head_width]` each, from position P on.
        bias: for each row and document a number, added to the attention logits of all tokens of the document.
    """

    def __init__(self, opening: Tensor, documents: Sequence[Sequence[Tensor]], bias: Sequence[Sequence[float]]) -> None:
        start, device = opening.shape[3], opening.device
        lengths = [[part.shape[3] for part in row] for row in documents]
        self.prefix_length = start + max(map(sum, lengths))
        self._opening, self._documents = opening, documents
        self._next = torch.tensor([start + max(row, default=0) for row in lengths], device=device)
        seen = torch.zeros(len(documents), self.prefix_length, dtype=torch.bool)
        positions, added = torch.zeros(seen.shape, dtype=torch.long), torch.zeros(seen.shape)
        for number, (row, of_row) in enumerate(zip(lengths, bias, strict=True)):
            places = [*range(start), *(start + place for length in row for place in range(length))]
            seen[number, : len(places)] = True
            positions[number, : len(places)] = torch.tensor(places)
            added[number, start : len(places)] = torch.tensor(
                [number for number, length in zip(of_row, row, strict=True) for _ in range(length)]
            )
        self._seen, self._positions, self._bias = seen.to(device), positions.to(device), added.to(device)

    @property
    def next_positions(self) -> Tensor:
        return self._next

    def beside_none(self) -> BlockPrefix:
        raise NotImplementedError("the opening is a part of the prompt: no row can go without it")

    def prefix_mask(self, mask: Tensor) -> Tensor:
        return self._seen.to(mask)

    def cache(self, dtype: torch.dtype) -> DynamicCache | None:
        *before, heads, _, width = self._opening.shape
        shape = (*before, len(self._documents), heads, with_spare(self.prefix_length), width)
        batch = self._opening.new_empty(shape, dtype=dtype)
        for row, documents in enumerate(self._documents):
            start = 0
            for part in (self._opening, *documents):
                stop = start + part.shape[3]
                batch[:, :, row, :, start:stop] = part
                start = stop
            batch[:, :, row, :, start : self.prefix_length] = 0.0  # never attended to, but it must be finite
        # All positions are kept, even in layers with a sliding window.
        cache = DynamicCache()
        cache.layers = [GrowingLayer(keys, values, self.prefix_length) for keys, values in batch.unbind(0)]
        return cache

    def after_cache(self, rows: Tensor) -> BlockPrefix:
        chosen = object.__new__(BlockPrefix)
        chosen._opening, chosen._documents = self._opening, [self._documents[row] for row in rows.tolist()]
        rows = rows.to(self._opening.device)
        chosen._next, chosen.prefix_length = self._next[rows], int(self._seen[rows].sum(1).max())
        for name in ("_seen", "_positions", "_bias"):
            setattr(chosen, name, getattr(self, name)[rows, : chosen.prefix_length])
        return chosen

    def followed_by(self, other: Modulation) -> BlockPrefix | None:
        if type(other) is not type(self):
            return None
        both = object.__new__(type(self))
        both.prefix_length = max(self.prefix_length, other.prefix_length)
        both._opening, both._documents = self._opening, [*self._documents, *other._documents]
        both._next = torch.cat([self._next, other._next])
        for name in ("_seen", "_positions", "_bias"):
            parts = [getattr(each, name) for each in (self, other)]
            longer = [functional.pad(part, (0, both.prefix_length - part.shape[1])) for part in parts]
            setattr(both, name, torch.cat(longer))
        return both

    @contextmanager
    def attached(self, lm: Any) -> Iterator[None]:
        """Gives the LM the masks that this prefix needs: float masks with the bias, one for each kind of layer."""
        config, dtype = lm.config.get_text_config(), lm.get_input_embeddings().weight.dtype

        def hook(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
            mask = named["attention_mask"]
            if isinstance(mask, dict) or mask.ndim == 4:
                return None  # made already, when the LM was called
            masks = self.masks(mask, named["position_ids"], config, dtype)
            return arguments, {**named, "attention_mask": masks}

        # Callers call either of the two, and some LMs (OPT) call a part of their base model and not the model itself.
        handles = [part.register_forward_pre_hook(hook, with_kwargs=True) for part in (lm, lm.base_model)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def masks(self, mask: Tensor, positions: Tensor, config: Any, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """Float masks `[B, 1, l, P + L]`: one for all layers, or one for each kind of layer that the LM has.

        Args:
            mask: `[B, P + L]`, which keys are real tokens.
            positions: `[B, l]`, positions of the queries, which are the last l of the L tokens.
            config: the LM's configuration, for sliding windows.
            dtype: dtype of the masks.
        """
        own = mask[:, self.prefix_length :]
        own_positions = self._next[:, None] + own.cumsum(1) - 1
        # [B, l, P + L]: how far each key is before each query.
        distance = positions[:, :, None] - torch.cat([self._positions, own_positions], 1)[:, None]
        seen = mask.bool()[:, None] & (distance >= 0)
        bias = torch.cat([self._bias, torch.zeros_like(own, dtype=self._bias.dtype)], 1)[:, None]

        def additive(visible: Tensor) -> Tensor:
            # The lowest number and not -inf: a padding token that sees nothing must not become NaN.
            return bias.to(dtype).masked_fill(~visible, torch.finfo(dtype).min)[:, None]

        if not has_limited_layers(config):
            return additive(seen)
        window = additive(seen & (distance < config.sliding_window))
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            return window
        return {kind: window if kind == "sliding_attention" else additive(seen) for kind in dict.fromkeys(kinds)}


@contextmanager
def grouping(lm: Any) -> Iterator[None]:
    """On a CPU, gives an LM in bf16 with PyTorch's attention `grouped_attention` within the context.

    An LM that does not take other attention than its own would compute by hand, and without a mask not even causally.
    """
    weight, implementation = lm.get_input_embeddings().weight, lm.config._attn_implementation
    on_cpu = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    if on_cpu and implementation == "sdpa" and getattr(lm, "_supports_attention_backend", False):
        lm.config._attn_implementation = _GROUPED
    try:
        yield
    finally:
        lm.config._attn_implementation = implementation


def grouped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of few queries to many keys, by products of matrices; as transformers calls it, `[B, heads, l, width]`.

    The query heads that share keys and values are one matrix, so neither is repeated. In bf16 on a CPU a token after
    2,048 others takes a twentieth of the time of PyTorch's attention. Logits are rounded to bf16, as transformers' own
    `eager` does. Whatever is not plain attention with a mask, or of one query to all keys, is left to PyTorch's.
    """
    heads, length, kept = query.shape[1], query.shape[2], key.shape[2]
    special = any(options.get(name) is not None for name in ("softcap", "s_aux", "position_bias", "cache"))
    if (
        (attention_mask is None and length > 1)
        or special
        or options.get("dropout")
        or torch.is_grad_enabled()
        or len(query) * heads * length * kept > _MOST_SCORES
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    scaling = options.get("scaling")
    out = by_products(query, key, value, attention_mask, query.shape[3] ** -0.5 if scaling is None else scaling)
    return out.transpose(1, 2).contiguous(), None


def by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention by products of matrices, in which the query heads that share keys and values are one matrix.

    Args:
        query: `[B, heads, l, width]`.
        key, value: `[B, kv_heads, L, width]`; `heads` is a multiple of `kv_heads`.
        mask: `[B, 1, l, L]`, added to the logits or True for what is seen; None if all is.
        scaling: of the logits.

    Returns:
        `[B, heads, l, width]`.
    """
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    rows = (query * scaling).unflatten(1, (-1, groups)).flatten(2, 3)  # [B, kv_heads, groups * l, width]
    # The second factor of a batch of products is copied, which takes longest if it is transposed: that is the smaller.
    flat = (key @ rows.mT).mT.contiguous() if rows.shape[2] <= _FEW_QUERIES else rows @ key.mT
    scores = flat.unflatten(2, (groups, length))
    if mask is not None and mask.is_floating_point():
        scores += mask[:, :, None]
    elif mask is not None:  # the lowest number and not -inf: padding sees nothing, but must not become NaN
        scores.masked_fill_(~mask[:, :, None], torch.finfo(scores.dtype).min)
    out: Tensor = (scores.softmax(-1).flatten(2, 3) @ value).unflatten(2, (groups, length)).flatten(1, 2)
    return out


AttentionInterface.register(_GROUPED, grouped_attention)
AttentionMaskInterface.register(_GROUPED, sdpa_mask)
