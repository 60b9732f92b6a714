"""A bank as an aggregation network's blocks attend to it for some questions: which rows, and with which bias."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from mac_rag.nn.attention import Chunk, needed_of_all
from mac_rag.nn.bank_view import BankRows, BoundedView, is_bounded, is_view, prior_keys
from mac_rag.nn.cross_attention import CrossAttentionBlock
from mac_rag.nn.memory_slots import FirstRows, MemorySlots
from mac_rag.nn.prior import Candidates, ChosenKeys, DocumentPrior, RankedFirst, RecencyTerm

# Number of needed rows whose keys and values are gathered at a time.
_GATHERED = 256


class Attends(Protocol):
    """The parts of an aggregation network that determine how it attends to a bank."""

    blocks: nn.ModuleList
    prior: DocumentPrior | None
    use_prior: bool

    @property
    def slots_in_use(self) -> MemorySlots | None:
        """The slots, if the document prior is in use; otherwise None."""

    @property
    def recency_in_use(self) -> RecencyTerm | None:
        """The recency term, if attention uses it; otherwise None."""


class AttendedBank:
    """A bank as the blocks attend to it for B questions.

    It computes the bias of the logits, document prior and mask, and which rows can matter given the bias. With slots in
    use, each question has S consecutive queries.

    Args:
        network: the aggregation network.
        bank: K rows.
        queries: `[B, d_prior]`, see `AggregationNetwork.prior_queries`; None without a prior, or with `scores`.
        mask, scores, asked: as for `AggregationNetwork.forward`.
        dtype: dtype of the bias.

    Attributes:
        among: the recency term's candidates in the whole bank, if `bank` is a part of it; set it before anything is
            attended to. None if `bank` is the whole bank.
        first_of_all: the rows that the prior ranks first in the whole bank; as `among`.

    Raises:
        ValueError: for queries, but rows without prior keys.
    """

    def __init__(
        self,
        network: Attends,
        bank: BankRows,
        queries: Tensor | None,
        *,
        mask: Tensor | None = None,
        scores: Tensor | None = None,
        asked: Tensor | None = None,
        dtype: torch.dtype,
    ) -> None:
        self.bank = bank
        self.blocks = [block for block in network.blocks if isinstance(block, CrossAttentionBlock)]
        self.prior = network.prior if network.use_prior else None
        self.queries = queries
        self.prior_keys = None if self.queries is None else prior_keys(bank)
        self.given = None if self.prior is None else scores
        self.recency = None if self.queries is None else network.recency_in_use
        self.asked = asked
        self.among: Candidates | None = None
        self.first_of_all: FirstRows | None = None
        self.slots = network.slots_in_use
        self._seen = mask
        self.mask = mask if mask is None or self.slots is None else mask.repeat_interleave(self.slots.count, 0)
        self.dtype = dtype

    def floor(self, number: int, query: Tensor) -> Tensor | None:
        """A lower bound `[B, H, S]` of the largest logits of queries `[B, H, S, d]`; None if a bound would not help."""
        block = self.blocks[number]
        best = self._best(number, block)
        if best is None or best.bias is None:
            return None
        return (query @ best.keys[:, :, 0].mT).amax(-1) + best.bias

    def chunks(
        self, number: int, query: Tensor, *, floor: Tensor | None = None
    ) -> tuple[Iterator[Chunk], Tensor | None, Tensor | None]:
        """The rows that a block's queries `[B, H, S, d]` attend to.

        Args:
            number: index of the block.
            query: its queries.
            floor: a lower bound `[B, H, S]` of their largest logits over more rows than these; None computes the bound
                from these rows.

        Returns:
            The chunks; the indices of their rows, ascending, or None for the whole bank; and the bound.
        """
        block = self.blocks[number]
        if floor is None:
            floor = self.floor(number, query)
        if floor is None or not is_bounded(self.bank):
            return self._all(number, block, query, None), None, floor
        longest, weights = self.bank.longest(number), block.prior_weights
        assert weights is not None  # there is no floor without them
        needed = needed_of_all(
            query,
            longest,
            self.bank.row_tokens,
            self._scores,
            weights,
            floor,
            longest_of_all=self.bank.longest_of_all(number),
        )
        if 2 * len(needed) < self.bank.documents:
            return self._some(number, block, query, self.bank, longest, needed), needed, floor
        return self._all(number, block, query, longest), None, floor

    def of_all_rows(self, number: int, mass: Tensor, rows: Tensor | None, floor: Tensor | None) -> Tensor:
        """The attention mass on all rows `[B, K]`, from the mass on the rows of a block's `chunks`.

        The mass on all other rows is below rounding. They get values that are surely negligible but in the order of the
        document prior, because users ask for more documents than matter.

        Args:
            number: index of the block.
            mass: `[B, n]`, the mass on the rows of the chunks.
            rows, floor: as `chunks` returned them.
        """
        if rows is None or floor is None:
            return mass
        assert is_bounded(self.bank)
        weights, whole = self.blocks[number].prior_weights, torch.zeros_like(self._scores)
        assert weights is not None
        # As if their keys were zero. Their logits are far below the bound, and the bound is never too high.
        faint = floor.neg().logsumexp(-1) + math.log(self.bank.row_tokens / floor.shape[-1])  # [B, H]
        for head, weight in enumerate(weights):
            whole += (weight * self._scores + faint[:, head, None]).exp() / len(weights)
        return whole.to(mass).index_copy(1, rows, mass)

    def _some(
        self,
        number: int,
        block: CrossAttentionBlock,
        query: Tensor,
        bank: BoundedView,
        longest: Tensor,
        needed: Tensor,
    ) -> Iterator[Chunk]:
        """The rows with the indices `needed` as a block sees them."""
        for index in needed.split(_GATHERED) if len(needed) else ():  # none if all rows that matter are elsewhere
            keys, values = bank.rows(number, index.cpu())
            yield Chunk(keys, values, self._bias(block, query, index), longest[:, index])

    def _all(self, number: int, block: CrossAttentionBlock, query: Tensor, longest: Tensor | None) -> Iterator[Chunk]:
        """The whole bank as a block sees it."""
        start = 0
        for keys, values in self.bank.chunks(number):
            rows = slice(start, start + keys.shape[-3])
            start = rows.stop
            yield Chunk(keys, values, self._bias(block, query, rows), None if longest is None else longest[:, rows])

    def _best(self, number: int, block: CrossAttentionBlock) -> Chunk | None:
        """The row with the highest document prior for each question, as a block sees it; None if it would not help.

        It tells early which other rows cannot matter. A GPU attends to all rows faster than it would find out, unless
        their keys and values have yet to be computed.
        """
        if self.queries is None or torch.is_grad_enabled():
            return None
        if not is_view(self.bank) or not self.bank.documents:
            return None
        keys = self.prior_keys
        if self.slots is not None and (isinstance(keys, ChosenKeys) or (isinstance(keys, Tensor) and keys.ndim == 3)):
            return None  # each question has its own rows, and they are few
        if self.queries.device.type != "cpu" and not (is_bounded(self.bank) and not self.bank.cached):
            return None
        score, index = self._scores.max(1)
        ((keys, values),) = self.bank.select(index[:, None]).chunks(number)
        return Chunk(keys, values, block.prior_bias(score[:, None]))

    @cached_property
    def scores(self) -> Tensor:
        """The document prior's scores of all rows `[B, K]`; `-inf` for rows that a question may not see."""
        scores, first = self._by_text, self._ranked_first
        if self.recency is None or self.prior is None or first is None:
            return scores
        own = first.candidates
        among = own if self.among is None else self.among
        return first.added(scores, self.recency.penalties(own, among, self.asked, self.prior.log_scale.exp()))

    @property
    def candidates(self) -> Candidates | None:
        """The recency term's candidates among these rows; None without the term, or for rows without dates."""
        return None if self._ranked_first is None else self._ranked_first.candidates

    @property
    def first(self) -> FirstRows | None:
        """The rows that the prior ranks first, in the whole bank if known; None without slots or without a prior."""
        return self._own_first if self.first_of_all is None else self.first_of_all

    @cached_property
    def _own_first(self) -> FirstRows | None:
        return None if self.slots is None else self.slots.first(self.scores)

    @cached_property
    def _ranked_first(self) -> RankedFirst | None:
        keys, dates = self.prior_keys, self.bank.dates
        if self.recency is None or self.prior is None or keys is None or dates is None:
            return None
        width = self.prior.key.out_features
        summaries = keys[..., :width] if isinstance(keys, Tensor) else keys
        if not len(dates):  # one of several processes may have no rows; then its keys have no width
            summaries = self._by_text.new_empty(0, width)
        return RankedFirst.among(self._by_text, summaries, dates)

    @cached_property
    def _by_text(self) -> Tensor:
        """As `scores`, without the recency term."""
        assert self.prior is not None
        if self.queries is None:
            assert self.given is not None
            scores = self.given
        else:
            assert self.prior_keys is not None
            scores = self.prior.score(self.queries, self.prior_keys)
        return scores if self._seen is None else scores.masked_fill(~self._seen, -torch.inf)

    @cached_property
    def _scores(self) -> Tensor:
        """The scores for each query: with slots, those of each slot."""
        if self.first is None or self.slots is None:
            return self.scores
        return self.slots.scores(self.scores, self.first)

    def _bias(self, block: CrossAttentionBlock, query: Tensor, rows: slice | Tensor) -> Tensor | None:
        bias = None if self.prior is None else block.prior_bias(self._scores[:, rows])
        if self.mask is not None:
            hidden = ~self.mask[:, None, rows].expand(-1, block.heads, -1)
            bias = torch.zeros_like(hidden, dtype=self.dtype) if bias is None else bias
            bias = bias.masked_fill(hidden, -torch.inf)
        return bias
