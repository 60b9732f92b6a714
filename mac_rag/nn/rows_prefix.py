"""A block prefix on a GPU: rows stay where they were decoded, and Triton kernels attend to them.

`BlockPrefix` copies the rows of a batch of questions side by side, padded to the longest, and gives the LM float masks
over all of them. Here the LM's cache holds only what follows the prefix. What each token takes from its question's rows
(`mac_rag.nn.row_kernels`) is merged with its attention to the tokens before it, by the sums of their exponentials.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from mac_rag.errors import ModelLoadError
from mac_rag.nn.block_prefix import BlockPrefix
from mac_rag.nn.modulation import Modulation, has_limited_layers

_ROWS = "mac_rag_rows"  # name of this attention among transformers' own
_ALIGNED = 16  # bytes; the kernels rely on it
_MOST_SCORES = 1 << 26  # attention logits of one layer that are in memory at a time
_WIDEST = 128  # head for which the kernels' tiles fit into a multiprocessor


def is_supported(lm: Any) -> bool:
    """True for an LM in 16 bits on one GPU, with Triton, whose layers see all positions through PyTorch's attention.

    Its attention must also be nothing more than that, which the caller knows.
    """
    config, weight = lm.config.get_text_config(), lm.get_input_embeddings().weight
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (
        {part.device for part in lm.parameters()} == {weight.device}
        and weight.device.type == "cuda"
        and weight.dtype in (torch.bfloat16, torch.float16)
        and width <= _WIDEST
        and not has_limited_layers(config)
        and lm.config._attn_implementation == "sdpa"
        and find_spec("triton") is not None
    )


class RowsPrefix(BlockPrefix):
    """As `BlockPrefix`, for LMs that `is_supported`: the same arguments and, up to rounding, the same results."""

    def __init__(self, opening: Tensor, documents: Sequence[Sequence[Tensor]], bias: Sequence[Sequence[float]]) -> None:
        longest = [max((part.shape[3] for part in row), default=0) for row in documents]
        self._next = torch.tensor([opening.shape[3] + length for length in longest], device=opening.device)
        self._seen = self._positions = self._bias = self._next.new_zeros(len(documents), 0)
        # Questions that share a row, and all of them the opening, read it at the same address.
        self._rows = [[_laid_out(part) for part in (opening, *row)] for row in documents]
        self._added = [[0.0, *row] for row in bias]

    def cache(self, dtype: torch.dtype) -> None:
        return None

    def after_cache(self, rows: Tensor) -> RowsPrefix:
        chosen = object.__new__(RowsPrefix)
        chosen._rows, chosen._added = ([part[row] for row in rows.tolist()] for part in (self._rows, self._added))
        for name in ("_next", "_seen", "_positions", "_bias"):
            setattr(chosen, name, getattr(self, name)[rows.to(self._next.device)])
        return chosen

    def followed_by(self, other: Modulation) -> RowsPrefix | None:
        if not isinstance(other, RowsPrefix):
            return None
        both = object.__new__(RowsPrefix)
        both._rows, both._added = [*self._rows, *other._rows], [*self._added, *other._added]
        for name in ("_next", "_seen", "_positions", "_bias"):
            setattr(both, name, torch.cat([getattr(self, name), getattr(other, name)]))
        return both

    @contextmanager
    def attached(self, lm: Any) -> Iterator[None]:
        token, own = _ACTIVE.set(self), lm.config._attn_implementation
        lm.config._attn_implementation = _ROWS
        try:
            with super().attached(lm):
                yield
        finally:
            lm.config._attn_implementation = own
            _ACTIVE.reset(token)

    def taken(self, layer: int, query: Tensor, kv_heads: int, scaling: float) -> tuple[Tensor, Tensor]:
        """What queries take from the rows; see `mac_rag.nn.row_kernels.attended`."""
        from mac_rag.nn.row_kernels import RowTables, attended

        if self._tables is None:
            self._tables = RowTables.of(self._rows, self._added, self._next.device)
        return attended(query, self._tables, layer, kv_heads, scaling, max(map(len, self._rows)))

    _tables: Any = None


_ACTIVE: ContextVar[RowsPrefix] = ContextVar("rows_prefix")  # of the LM's pass that goes on in this thread


def _laid_out(row: Tensor) -> Tensor:
    row = row.contiguous()
    return row.clone() if row.data_ptr() % _ALIGNED else row


def rows_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Attention to the rows of the active `RowsPrefix` and to keys and values, as transformers calls it.

    Raises:
        ModelLoadError: for attention with anything else than a mask, such as a position bias.
    """
    special = [name for name in ("softcap", "s_aux", "position_bias", "cache") if options.get(name) is not None]
    if special or options.get("dropout"):
        raise ModelLoadError(
            f"the LM's attention has {', '.join(special) or 'dropout'}, which the kernels for a GPU do not know; load "
            "the LM with another attention than sdpa"
        )
    scaling = options.get("scaling")
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    parts, sums = _ACTIVE.get().taken(module.layer_idx, query, key.shape[1], scaling)
    own, own_sums = own_attention(query, key, value, attention_mask, scaling)
    out = merged(torch.cat([parts, own[None]]), torch.cat([sums, own_sums[None]]))
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


def own_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm of the sum of its exponentials, both in fp32.

    Args:
        query: `[B, heads, l, head_width]`.
        key, value: `[B, kv_heads, L, head_width]`; `heads` is a multiple of `kv_heads`.
        mask: `[B, 1, l, L]`, added to the logits.
        scaling: of the logits.

    Returns:
        `[B, heads, l, head_width]` and `[B, heads, l]`.
    """
    batch, heads, _, _ = query.shape
    at_once = max(1, _MOST_SCORES // max(1, batch * heads * key.shape[2]))
    parts = []
    for some, seen in zip(query.split(at_once, 2), mask.split(at_once, 2), strict=True):
        rows = some.unflatten(1, (key.shape[1], -1)).flatten(2, 3)  # [B, kv_heads, groups * l, head_width]
        logits = (rows @ key.mT).float().view(batch, heads, -1, key.shape[2]) * scaling + seen
        sums = logits.logsumexp(-1)
        weights = (logits - sums[..., None]).exp().to(value.dtype)
        parts.append(((weights.view(*rows.shape[:3], -1) @ value).float().view(some.shape), sums))
    outs, all_sums = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(all_sums, 2)


def merged(parts: Tensor, sums: Tensor) -> Tensor:
    """Attention to n sets of keys as one: `[n, ...]` and `[n, ..., head_width]` to `[..., head_width]`."""
    shares = (sums - sums.logsumexp(0)).exp()
    return (parts * shares[..., None]).sum(0)


AttentionInterface.register(_ROWS, rows_attention)
AttentionMaskInterface.register(_ROWS, sdpa_mask)
