"""Attention to a memory bank. Every strategy is a `BankAttention`; direct attention is the oracle for the others.

Attention over a part of the bank is described, for each query token, by the largest logit, the sum of the weights
relative to it, and the values summed under these weights (`Partial`). Two parts merge exactly, so the bank may come in
chunks, and from several processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Number of logits that streaming attention holds at once: as many as fit a CPU's cache, or enough to keep a GPU busy.
_LOGITS = {"cpu": 1 << 20, "other": 1 << 24}
# The same for attention recomputed for its gradients: fewer and larger pieces, because each is an autograd node.
_RECOMPUTED = {"cpu": 1 << 22, "other": 1 << 26}
# Number of query vectors, of all heads, in one product with keys; more questions are processed group by group.
_QUERIES = 1 << 15


@dataclass(frozen=True)
class Chunk:
    """Some rows of a bank as one block sees them.

    A row is the memory tokens `[T, D]` of one document, or of one part of a long one.

    Attributes:
        keys, values: `[H, k, T, d]` for all questions, or `[G, H, k, T, d]` if each run of B / G questions has its own
            rows; with G = B, each question has its own.
        bias: `[B, H, k]`, added to the logits of all T tokens of a row; `-inf` hides the row. None for no bias.
        longest: `[H, k]` or `[G, H, k]`, the largest norm of each row's keys; None if unknown.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor | None
    longest: Tensor | None = None


class BankAttention(Protocol):
    """Softmax attention of every question over the tokens of all rows of a bank."""

    def __call__(
        self, query: Tensor, chunks: Iterable[Chunk], *, floor: Tensor | None = None, mass: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attends.

        Args:
            query: `[B, H, S, d]`, S query tokens of each question, already scaled.
            chunks: the bank; each question sees at least one row.
            floor: `[B, H, S]`, a lower bound of the largest logit; rows that cannot matter given it may be skipped.
            mass: True also computes the attention mass.

        Returns:
            The attended values `[B, H, S, d]`; and the attention mass of each row `[B, K]`, or None without `mass`. A
            row's mass is its softmax weights summed over its tokens and averaged over heads and query tokens, so that
            the masses of each question sum to 1.
        """


@dataclass(frozen=True)
class Partial:
    """Attention over a part of the bank, to be merged with attention over the rest.

    Attributes:
        maximum: `[B, H, S, 1]`, the largest logit, or any number near it; finite even if all rows are hidden.
        total: `[B, H, S, 1]`, the sum of `exp(logit - maximum)`.
        weighted: `[B, H, S, d]`, the values summed under these weights.
        row_lse: `[B, H, S, k]`, the log-sum-exp of each row's logits, for consecutive rows; None without mass.
    """

    maximum: Tensor
    total: Tensor
    weighted: Tensor
    row_lse: tuple[Tensor, ...] | None

    @property
    def attended(self) -> Tensor:
        """Attended values `[B, H, S, d]`; zero where no row is seen."""
        return self.weighted / self.total.clamp(min=torch.finfo(self.total.dtype).tiny)

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of all logits `[B, H, S, 1]`; `-inf` where no row is seen."""
        return self.maximum + self.total.log()

    @property
    def packed(self) -> Tensor:
        """Everything except `row_lse` in one tensor `[B, H, S, d + 2]`, to be sent to another process."""
        return torch.cat([self.weighted, self.total, self.maximum], -1)

    @classmethod
    def unpacked(cls, packed: Tensor) -> Partial:
        """The partial from its `packed` tensor; it can be merged, but has no mass."""
        return cls(packed[..., -1:], packed[..., -2:-1], packed[..., :-2], None)

    def merged(self, other: Partial) -> Partial:
        """Attention over both parts; the other's rows come after this one's."""
        maximum = torch.maximum(self.maximum, other.maximum)
        ours, theirs = (self.maximum - maximum).exp(), (other.maximum - maximum).exp()
        return Partial(
            maximum,
            self.total * ours + other.total * theirs,
            self.weighted * ours + other.weighted * theirs,
            None if self.row_lse is None or other.row_lse is None else self.row_lse + other.row_lse,
        )

    def mass(self, lse: Tensor) -> Tensor:
        """Attention mass `[B, k]` of the part's rows.

        Args:
            lse: `[B, H, S, 1]`, the log-sum-exp over the whole bank.
        """
        bounded = lse.clamp(min=torch.finfo(lse.dtype).min)  # -inf - -inf would be NaN
        masses = [(rows - bounded).exp().mean((1, 2)) for rows in self.row_lse or ()]
        return torch.cat(masses, 1) if masses else lse.new_zeros(len(lse), 0)


def direct_attention(
    query: Tensor, chunks: Iterable[Chunk], *, floor: Tensor | None = None, mass: bool = False
) -> tuple[Tensor, Tensor | None]:
    """One softmax over the whole bank, the oracle. Memory grows with B * H * S * K * T."""
    del floor  # no row is skipped
    chunk = _joined(list(chunks), query)
    keys, values = _runs(chunk.keys), _runs(chunk.values)
    rows, tokens = keys.shape[2:4]
    logits = _folded(query, keys) @ keys.flatten(2, 3).mT  # [G, H, B / G * S, k * T]
    if chunk.bias is not None:
        shaped = logits.unflatten(2, (-1, query.shape[2])).unflatten(-1, (rows, tokens))
        logits = (shaped + _shaped_bias(chunk.bias, len(keys))).flatten(4).flatten(2, 3)
    weights = logits.softmax(-1)
    attended = _unfolded(weights @ values.flatten(2, 3), query)
    if not mass:
        return attended, None
    return attended, _unfolded(weights.unflatten(-1, (rows, tokens)).sum(-1), query).mean((1, 2))


def recomputing_attention(
    query: Tensor, chunks: Iterable[Chunk], *, floor: Tensor | None = None, mass: bool = False
) -> tuple[Tensor, Tensor | None]:
    """For training: direct attention of a few questions at a time, recomputed in the backward pass.

    Memory does not grow with B. On a CPU this also saves the time of allocating fresh memory.
    """
    del floor  # training may raise the weight of a row that does not matter yet, so no row is skipped
    chunk = _joined(list(chunks), query)
    rows, tokens = chunk.keys.shape[-3:-1]
    heads, length = query.shape[1:3]
    logits = heads * length * rows * tokens  # of one question
    budget = _RECOMPUTED["cpu" if query.device.type == "cpu" else "other"]

    def attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return direct_attention(query, [Chunk(keys, values, bias)], mass=mass)

    parts = []
    for group in _groups(len(query), len(_runs(chunk.keys)), max(1, budget // logits)):
        some = _slice(chunk, len(query), group, slice(0, rows))
        inputs = query[group], some.keys, some.values, some.bias
        parts.append(checkpoint(attend, *inputs, use_reentrant=False, preserve_rng_state=False))
    return torch.cat([a for a, _ in parts]), torch.cat([m for _, m in parts]) if mass else None


def streaming_attention(
    query: Tensor, chunks: Iterable[Chunk], *, floor: Tensor | None = None, mass: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Equals direct attention, but computed chunk by chunk: working memory depends neither on K nor on B.

    With `mass`, the log-sum-exp of each row, `[B, H, S, K]`, is kept to the end; it takes T times less memory than
    direct attention's weights. Gradients pass through the attended values, not through the mass.
    """
    partial = partial_attention(query, chunks, floor=floor, mass=mass)
    return partial.attended.to(query.dtype), partial.mass(partial.lse.detach()).to(query.dtype) if mass else None


def partial_attention(
    query: Tensor, chunks: Iterable[Chunk], *, floor: Tensor | None = None, mass: bool = False
) -> Partial:
    """Streaming attention over some rows, to be merged with attention over others.

    Half-precision chunks without bias are computed in their own precision, as fused kernels do; all others in the
    query's precision, and at least in float32.

    Args:
        query, floor, mass: as for `BankAttention`.
        chunks: the rows; there may be none.
    """
    start = replace(_nothing(query), row_lse=() if mass else None)
    return reduce(Partial.merged, (part for chunk in chunks for part in _parts(query, chunk, floor, mass)), start)


def _parts(query: Tensor, chunk: Chunk, floor: Tensor | None, mass: bool) -> Iterator[Partial]:
    """Attention over a chunk: in one part if a fused kernel takes it, else in parts within the budget."""
    rows, tokens = chunk.keys.shape[-3:-1]
    if not rows:
        return
    if chunk.bias is None and not mass:
        fused = _fused(query, chunk)
        if fused is not None:
            yield fused
            return
    heads, length = query.shape[1:3]
    groups = _groups(len(query), len(_runs(chunk.keys)), max(1, _QUERIES // (heads * length)))
    budget = _LOGITS["cpu" if query.device.type == "cpu" else "other"]
    biased = not mass and _kernel_takes_bias(query, chunk)
    # Plain attention holds the logits of each question and row; the kernel only the bias.
    step = max(1, budget // (len(query[groups[0]]) * heads * tokens * (1 if biased else length)))
    for first in range(0, rows, step):
        pieces = [(group, _slice(chunk, len(query), group, slice(first, first + step))) for group in groups]
        if not biased:
            parts = [_plain(query[group], piece, mass) for group, piece in pieces]
        elif floor is None:
            parts = [_fused_with_bias(query[group], piece) for group, piece in pieces]
        else:
            parts = [_skipping(query[group], piece, floor[group]) for group, piece in pieces]
        yield parts[0] if len(parts) == 1 else _stacked(parts)


def _groups(batch: int, runs: int, most: int) -> list[slice]:
    """Groups of at most `most` questions: several runs each, or parts of a run that is too large; the largest first."""
    run = batch // runs
    if run <= most:
        size = most // run * run
        return [slice(first, min(first + size, batch)) for first in range(0, batch, size)]
    starts = range(0, batch, run)
    return [
        slice(first, min(first + most, start + run)) for start in starts for first in range(start, start + run, most)
    ]


def _slice(chunk: Chunk, batch: int, group: slice, rows: slice) -> Chunk:
    """Some rows of a chunk for a group of questions."""
    keys, values, longest = chunk.keys, chunk.values, chunk.longest
    if keys.ndim == 5:
        run = batch // len(keys)
        runs = slice(group.start // run, -(-group.stop // run))
        keys, values, longest = keys[runs], values[runs], None if longest is None else longest[runs]
    bias = None if chunk.bias is None else chunk.bias[group, :, rows]
    return Chunk(keys[..., rows, :, :], values[..., rows, :, :], bias, None if longest is None else longest[..., rows])


def _plain(query: Tensor, chunk: Chunk, mass: bool) -> Partial:
    numbers = torch.promote_types(query.dtype, torch.float32)
    keys, values = (_runs(part).to(numbers) for part in (chunk.keys, chunk.values))
    rows, tokens = keys.shape[2:4]
    logits = _folded(query.to(numbers), keys) @ keys.flatten(2, 3).mT  # [G, H, B / G * S, k * T]
    if chunk.bias is not None:
        shaped = logits.unflatten(2, (-1, query.shape[2])).unflatten(-1, (rows, tokens))
        shaped += _shaped_bias(chunk.bias, len(keys))
    # Bounded, so that a part whose rows are all hidden has weight 0 and not NaN.
    maximum = logits.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(numbers).min)
    weights = logits.sub_(maximum).exp_()
    weighted, row_lse = weights @ values.flatten(2, 3), None
    if mass:
        totals = weights.unflatten(-1, (rows, tokens)).sum(-1)
        total, row_lse = totals.sum(-1, keepdim=True), (_unfolded(maximum + totals.detach().log(), query),)
    else:
        total = weights.sum(-1, keepdim=True)
    return Partial(_unfolded(maximum, query), _unfolded(total, query), _unfolded(weighted, query), row_lse)


def _shaped_bias(bias: Tensor, runs: int) -> Tensor:
    """`[B, H, k] -> [G, H, B / G, 1, k, 1]`, to be added to logits `[G, H, B / G, S, k, T]`."""
    shaped: Tensor = bias.unflatten(0, (runs, -1)).transpose(1, 2)[:, :, :, None, :, None]
    return shaped


def _fused(query: Tensor, chunk: Chunk) -> Partial | None:
    """Attention by a fused kernel that returns its log-sum-exp; None if torch has none for these tensors."""
    keys, values = _runs(chunk.keys).flatten(2, 3), _runs(chunk.values).flatten(2, 3)
    if _any_requires_grad(query, keys, values):
        return None
    folded = _folded(query.to(keys.dtype), chunk.keys)
    if query.device.type == "cpu":
        attended, lse = fused_cpu(folded, keys, values)
    elif query.device.type == "cuda" and query.shape[-1] % 8 == 0:
        parameters = torch.backends.cuda.SDPAParams(folded, keys, values, None, 0.0, False, False)
        if torch.backends.cuda.can_use_flash_attention(parameters):
            attended, lse = fused_flash(folded, keys, values)
        elif torch.backends.cuda.can_use_efficient_attention(parameters):
            attended, lse = fused_efficient(folded, keys, values)
        else:
            return None
    else:
        return None
    numbers = torch.promote_types(query.dtype, torch.float32)
    maximum = _unfolded(lse[..., None].to(numbers), query)
    return Partial(maximum, torch.ones_like(maximum), _unfolded(attended.to(numbers), query), None)


def _kernel_takes_bias(query: Tensor, chunk: Chunk) -> bool:
    """True if torch's CPU kernel can attend to the chunk with its bias. On a GPU, and for gradients, it cannot."""
    if query.device.type != "cpu" or chunk.bias is None:
        return False
    shared_or_own = len(_runs(chunk.keys)) in (1, len(query))
    return shared_or_own and not _any_requires_grad(query, chunk.keys, chunk.values, chunk.bias)


def _any_requires_grad(*tensors: Tensor) -> bool:
    """True if any tensor requires grad; the fused kernels' log-sum-exp is not differentiable."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _skipping(query: Tensor, chunk: Chunk, floor: Tensor) -> Partial:
    """Attention of each question over the rows that can matter to it; over all rows if most can."""
    assert chunk.bias is not None
    longest = longest_keys(chunk.keys) if chunk.longest is None else chunk.longest
    runs = longest if longest.ndim == 3 else longest[None]
    needed = needed_rows(query, runs, chunk.keys.shape[-2], chunk.bias, floor)
    if 2 * needed.sum() > needed.numel():
        return _fused_with_bias(query, chunk)
    keys, values = (_runs(part).expand(len(query), -1, -1, -1, -1) for part in (chunk.keys, chunk.values))
    parts = []
    for number, needed_by_one in enumerate(needed):
        index = needed_by_one.nonzero()[:, 0]
        one = slice(number, number + 1)
        piece = Chunk(keys[number][:, index], values[number][:, index], chunk.bias[one, :, index])
        parts.append(_fused_with_bias(query[one], piece) if len(index) else _nothing(query[one]))
    return _stacked(parts)


def _nothing(query: Tensor) -> Partial:
    """Attention over no rows."""
    numbers = torch.promote_types(query.dtype, torch.float32)
    empty = query.new_zeros((*query.shape[:3], 1), dtype=numbers)
    return Partial(
        torch.full_like(empty, torch.finfo(numbers).min), empty, torch.zeros_like(query, dtype=numbers), None
    )


def _fused_with_bias(query: Tensor, chunk: Chunk) -> Partial:
    numbers = torch.promote_types(query.dtype, torch.float32)
    tokens = chunk.keys.shape[-2]
    assert chunk.bias is not None
    keys, values = (
        _runs(part).to(numbers).flatten(2, 3).expand(len(query), -1, -1, -1) for part in (chunk.keys, chunk.values)
    )
    bias = chunk.bias.to(numbers)[:, :, None, :, None].expand(-1, -1, -1, -1, tokens).flatten(3)  # [B, H, 1, k * T]
    attended, lse = fused_cpu(query.to(numbers), keys, values, bias.expand(-1, -1, query.shape[2], -1))
    # If all rows are hidden, the kernel's log-sum-exp is zero and not minus infinity.
    hidden = chunk.bias.isneginf().all(-1)[..., None, None]
    maximum = lse.view(*query.shape[:3], 1).masked_fill(hidden, torch.finfo(numbers).min)
    return Partial(maximum, (~hidden).to(numbers).expand_as(maximum), attended, None)


def _joined(chunks: list[Chunk], query: Tensor) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    biases = None
    if any(chunk.bias is not None for chunk in chunks):
        nothing = [query.new_zeros(*query.shape[:2], chunk.keys.shape[-3]) for chunk in chunks]
        biases = torch.cat([zero if chunk.bias is None else chunk.bias for chunk, zero in zip(chunks, nothing)], -1)
    return Chunk(torch.cat([c.keys for c in chunks], -3), torch.cat([c.values for c in chunks], -3), biases)


def _stacked(groups: list[Partial]) -> Partial:
    """Parts of the same rows for consecutive groups of questions."""
    row_lse = None
    if groups[0].row_lse is not None:
        row_lse = tuple(torch.cat(rows) for rows in zip(*(group.row_lse or () for group in groups)))
    return Partial(
        torch.cat([group.maximum for group in groups]),
        torch.cat([group.total for group in groups]),
        torch.cat([group.weighted for group in groups]),
        row_lse,
    )


def _runs(rows: Tensor) -> Tensor:
    """Rows as `[G, H, k, T, d]`, with G = 1 for rows that all questions share."""
    return rows if rows.ndim == 5 else rows[None]


def _folded(query: Tensor, keys: Tensor) -> Tensor:
    """`[B, H, S, x] -> [G, H, B / G * S, x]`: joins the questions of a run, so that they share one product."""
    runs = len(keys) if keys.ndim == 5 else 1
    folded: Tensor = query.unflatten(0, (runs, -1)).transpose(1, 2).flatten(2, 3)
    return folded


def _unfolded(result: Tensor, query: Tensor) -> Tensor:
    """`[G, H, B / G * S, x] -> [B, H, S, x]`."""
    unfolded: Tensor = result.unflatten(2, (-1, query.shape[2])).transpose(1, 2).flatten(0, 1)
    return unfolded


# PyTorch's fused attention kernels with their log-sum-exp, which `torch.nn.functional` does not return.
#
# All take queries `[G, H, Q, d]`, already scaled, and keys and values `[G, H, N, d]`, and return the attended values
# `[G, H, Q, d]` and the log-sum-exp `[G, H, Q]`.


def fused_cpu(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Torch's kernel for CPUs.

    Args:
        query, keys, values: as above.
        bias: `[G, H, Q, N]`, added to the logits; None for no bias.
    """
    attended, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, attn_mask=bias, scale=1.0
    )
    return attended, lse


def fused_flash(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """FlashAttention, in half precision on CUDA."""
    attended, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, scale=1.0)
    return attended, lse


def fused_efficient(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Memory-efficient attention on CUDA. The kernel pads its log-sum-exp; the padding is cut off here."""
    attended, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, keys, values, None, compute_log_sumexp=True, scale=1.0
    )
    return attended, lse.narrow(2, 0, query.shape[2])


# Bounds that tell which rows of a bank can matter to a question; attention skips the others.
#
# The document prior puts most documents so far below the best one that their weight rounds to zero whatever their keys
# are. A bound costs one norm for each row; attention costs T times S products of keys and queries.


# Number of rows whose bounds are computed at a time, for each query of each question.
_BOUNDED = 1024


def longest_keys(keys: Tensor) -> Tensor:
    """The largest norm of each row's keys, in at least float32: `[..., k, T, d] -> [..., k]`."""
    norms: Tensor = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.promote_types(keys.dtype, torch.float32))
    return norms.amax(-1)


def needed_rows(query: Tensor, longest: Tensor, tokens: int, bias: Tensor, floor: Tensor) -> Tensor:
    """Mask of the rows that can matter to each question. All others together weigh less than a rounding error.

    By Cauchy and Schwarz, a logit is at most the product of the two norms, plus the bias.

    Args:
        query: `[B, H, S, d]`, already scaled.
        longest: `[G, H, k]`, the largest norm of each row's keys, for runs of B / G questions; G is 1 or B.
        tokens: T, number of tokens of a row.
        bias: `[B, H, k]`.
        floor: `[B, H, S]`, a lower bound of the largest logit over all rows.

    Returns:
        `[B, k]`, True for rows that can matter.
    """
    numbers = torch.promote_types(query.dtype, torch.float32)
    highest = query.to(numbers).norm(dim=-1)[..., None] * longest[:, :, None] + bias[:, :, None]  # [B, H, S, k]
    nothing = math.log(torch.finfo(numbers).eps / (bias.shape[-1] * tokens))
    return torch.any((highest - floor[..., None] > nothing).flatten(1, 2), 1)


def needed_of_all(
    query: Tensor,
    longest: Tensor,
    tokens: int,
    scores: Tensor,
    weights: Tensor,
    floor: Tensor,
    *,
    longest_of_all: Tensor | None = None,
) -> Tensor:
    """Indices of the rows of a whole bank that can matter to at least one question, from one score for each pair.

    Uses the bound of `needed_rows` in two steps: first with the longest key of all rows instead of each row's, which
    costs one comparison for each question, head and row; then, for the few remaining rows, with their own longest keys,
    leaving out the lightest. All rows left out in one step weigh together less than the rounding error.

    Args:
        query, tokens, floor: as for `needed_rows`.
        longest: `[H, K]`, the largest norm of each row's keys.
        scores: `[B, K]`, the document prior's scores.
        weights: `[H]`, each head's weight of the scores; weight times score is the bias.
        longest_of_all: `[H]`, the largest of each head's `longest`; None computes it.

    Returns:
        Indices of the rows `[n]`, ascending.
    """
    numbers = torch.promote_types(query.dtype, torch.float32)
    norms, rounding = query.to(numbers).norm(dim=-1), torch.finfo(numbers).eps
    largest = longest.amax(1) if longest_of_all is None else longest_of_all
    beside_bias = (norms * largest[:, None] - floor).amax(-1)  # [B, H]
    nothing = math.log(rounding / (scores.shape[1] * tokens))
    needed = torch.zeros(scores.shape[1], dtype=torch.bool, device=scores.device)
    for head, weight in enumerate(weights):
        needed |= (weight * scores > nothing - beside_bias[:, head, None]).any(0)
    index = needed.nonzero()[:, 0]
    if 2 * len(index) >= scores.shape[1]:  # so many rows are needed that the caller reads all
        return index
    bounds = torch.cat(
        [
            (norms[..., None] * longest[:, None, some] - floor[..., None]).amax(2)
            + weights[:, None] * scores[:, None, some]
            for some in index.split(_BOUNDED)
        ],
        -1,
    )  # [B, H, n]
    lightest = bounds.sort(-1)
    together = lightest.values.logcumsumexp(-1) + math.log(tokens)
    heavy = torch.zeros_like(bounds, dtype=torch.bool).scatter_(-1, lightest.indices, together > math.log(rounding))
    return index[heavy.flatten(0, 1).any(0)]
