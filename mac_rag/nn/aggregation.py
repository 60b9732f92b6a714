"""The aggregation network h_psi: question tokens attend to the whole bank and become one phi* (equation 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from mac_rag.nn.attention import BankAttention, Chunk, streaming_attention
from mac_rag.nn.bank_view import CHUNK_ROWS, BankProjection, BankRows, is_bounded, is_view, prior_keys
from mac_rag.nn.cross_attention import CrossAttentionBlock
from mac_rag.nn.document_prior import DocumentPrior
from mac_rag.nn.memory_slots import FirstRows, MemorySlots
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.prior_keys import PriorKeys
from mac_rag.nn.product_quantizer import ProductQuantizer
from mac_rag.nn.recency import Candidates, RankedFirst, RecencyTerm
from mac_rag.nn.row_bounds import longest_keys, needed_of_all

# Number of a block, whether the attention mass is wanted, and the block's queries `[B, H, S, d]` -> what they attend to
# and the mass, as `BankAttention` returns them.
Attend: TypeAlias = Callable[[int, bool, Tensor], tuple[Tensor, Tensor | None]]

# Rows that can matter to a batch of questions, of which keys and values are gathered at a time.
_GATHERED = 256


class OtherParts(Protocol):
    """The other parts of a bank of which one is here: what the document prior ranks first is known of all together."""

    def all_candidates(self, own: Candidates) -> Candidates:
        """The recency term's candidates of all parts."""

    def all_first_rows(self, own: FirstRows) -> FirstRows:
        """The first rows of all parts."""


class AggregationNetwork(nn.Module):
    """h_psi: blocks of cross-attention from the question's tokens to the bank (section 3 and appendix A).

    No positions are added to the bank, so the result does not depend on the order of its documents.

    Args:
        width: D.
        blocks: number of cross-attention blocks; four in the paper.
        heads, head_width: 8 heads of 96 in the paper.
        feed_forward: hidden width of the feed-forward networks, as a multiple of D.
        prior_width: width of the document prior's space; 0 for the paper's network, which has no prior.
        prior_sharpness: factor on the document prior in attention, except in training. The scales are learned over the
            documents of one batch; to keep the same share of attention on a document of a larger bank takes more.
        sentence_token: True if the first token of each text is a sentence encoder's, which the document prior compares.
        lexical_vectors: R, lexical vectors of each text, which the document prior alone reads; 0 for none.
        lexical_weight: weight of their product in the document prior.
        recency: True for a document prior in which newer documents on the same subject count more
            (`mac_rag.nn.recency`).
        slots: S, phi* has S times T tokens (`mac_rag.nn.memory_slots`).
        readout: True for phi* of the kind of memory tokens: the last block leaves out the residual of its attention.
        chunk_rows: rows of a bank in memory that are attended to at a time.

    Attributes:
        use_prior: False leaves the document prior out of attention, to measure what it contributes.
        use_recency: False leaves the recency term out of the prior, for the same purpose.
        quantizer: how a bank with rows `pq` keeps the memory tokens that the network reads; None if none was fitted.
    """

    def __init__(
        self,
        width: int,
        *,
        blocks: int = 4,
        heads: int = 8,
        head_width: int = 96,
        feed_forward: int = 4,
        prior_width: int = 0,
        prior_sharpness: float = 1.0,
        sentence_token: bool = False,
        lexical_vectors: int = 0,
        lexical_weight: float = 1.0,
        recency: bool = False,
        slots: int = 1,
        readout: bool = False,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        super().__init__()
        self.lexical_vectors = lexical_vectors
        self.chunk_rows = chunk_rows
        self.bank_norm = nn.LayerNorm(width)  # one for all blocks: they look at the same bank
        self.blocks = nn.ModuleList(
            CrossAttentionBlock(
                width,
                heads,
                head_width,
                feed_forward,
                prior_width > 0,
                prior_sharpness,
                readout=readout and number == blocks - 1,
            )
            for number in range(blocks)
        )
        self.prior = DocumentPrior(width, prior_width, sentence_token, lexical_weight) if prior_width else None
        self.recency = RecencyTerm() if recency else None
        self.slots = MemorySlots(slots, width) if slots > 1 else None
        self.use_prior = True
        self.use_recency = True
        self.quantizer: ProductQuantizer | None = None

    def project(self, phi: MemoryTokens) -> BankProjection:
        """Projects a bank of K texts once, for any number of questions."""
        bank = self.bank_norm(phi.tokens)
        projected = [block.project(bank) for block in self.blocks if isinstance(block, CrossAttentionBlock)]
        return BankProjection(
            keys=tuple(keys for keys, _ in projected),
            values=tuple(values for _, values in projected),
            prior_keys=None if self.prior is None else self.prior.keys(phi),
            chunk_rows=self.chunk_rows,
        )

    @property
    def summary_width(self) -> int:
        """Numbers of a row's summary (`summaries`); 0 without a document prior."""
        if self.prior is None:
            return 0
        heads = sum(block.heads for block in self.blocks if isinstance(block, CrossAttentionBlock))
        return self.prior.key.out_features + heads

    def summaries(self, phi: MemoryTokens, keys: Iterable[Tensor] | None = None) -> Tensor:
        """What tells which rows can matter to a question without reading them, `[K, summary_width]`.

        It is the row's key of the document prior, without its lexical part, and for each block and head the largest
        norm of the row's keys.

        Args:
            phi: K rows.
            keys: their keys `[H, K, T, d]` for each block, where they are known.
        """
        if self.prior is None:
            return phi.tokens.new_empty(len(phi), 0)
        if keys is None:
            bank = self.bank_norm(phi.tokens)
            keys = (block.project_keys(bank) for block in self.blocks if isinstance(block, CrossAttentionBlock))
        prior_keys = self.prior.summary_keys(phi)
        return torch.cat([prior_keys, *(longest_keys(part).T.to(prior_keys.dtype) for part in keys)], 1)

    @property
    def recency_in_use(self) -> RecencyTerm | None:
        """The recency term, if it is part of attention."""
        return self.recency if self.use_prior and self.use_recency else None

    @property
    def slots_in_use(self) -> MemorySlots | None:
        """The slots, if the document prior tells them apart; without it all see the same, and one stands for all."""
        return self.slots if self.use_prior else None

    def with_recency(self, scores: Tensor, keys: Tensor, dates: Tensor, asked: Tensor | None) -> Tensor:
        """The document prior's scores `[B, K]` with the recency term; as they are, where it is not in use.

        Args:
            scores: the prior's scores.
            keys: the prior's keys, `[K, d_prior]`.
            dates: `[K]`, when the documents count.
            asked: `[B]`, see `RecencyTerm.penalties`.
        """
        if self.prior is None or self.recency_in_use is None:
            return scores
        first = RankedFirst.among(scores, keys[:, : self.prior.key.out_features], dates)
        own = first.candidates
        return first.added(scores, self.recency_in_use.penalties(own, own, asked, self.prior.log_scale.exp()))

    def prior_scores(self, question: MemoryTokens, bank: BankRows) -> Tensor:
        """The document prior's score `s(x, d)` for every question and row, `[B, K]`.

        Raises:
            ValueError: when the network has no document prior.
        """
        if self.prior is None:
            raise ValueError("this aggregation network has no document prior")
        return self.prior.score(self.prior.queries(question), prior_keys(bank))

    def forward(
        self,
        question: MemoryTokens,
        bank: BankRows,
        *,
        mask: Tensor | None = None,
        scores: Tensor | None = None,
        asked: Tensor | None = None,
        attention: BankAttention = streaming_attention,
        parts: OtherParts | None = None,
        mass: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Aggregates the bank for each question.

        Args:
            question: B questions as the input encoder encodes them; their tokens are the first query.
            bank: K rows.
            mask: `[B, K]`, True where a question may see a row; every question must see at least one.
            scores: `[B, K]`, the document prior's scores where they are known; None compares question and prior keys,
                and has the recency term, if the bank knows its dates.
            asked: `[B]`, see `RecencyTerm.penalties`.
            attention: the strategy.
            parts: the other parts, where `bank` is one of several.
            mass: True computes the attention mass, too.

        Returns:
            phi* `[B, T, D]`, with slots `[B, S T, D]`; and the last block's attention mass on each row `[B, K]`, of all
            slots by their shares of the prior, or None without `mass`.

        Raises:
            ValueError: when the document prior is in use, and the view has neither prior keys nor scores.
        """
        queries = None if scores is not None else self.prior_queries(question)
        attended_bank = AttendedBank(
            self, bank, queries, mask=mask, scores=scores, asked=asked, dtype=question.tokens.dtype
        )
        if parts is not None and (own := attended_bank.candidates) is not None:
            attended_bank.among = parts.all_candidates(own)
        if parts is not None and (first := attended_bank.first) is not None:
            attended_bank.first_of_all = parts.all_first_rows(first)

        def attend(number: int, mass: bool, query: Tensor) -> tuple[Tensor, Tensor | None]:
            chunks, floor = attended_bank.chunks(number, query, mass=mass)
            return attention(query, chunks, floor=floor, mass=mass)

        return self.aggregate(question, attend, first=attended_bank.first, mass=mass)

    def _side_by_side(
        self, slots: MemorySlots, first: FirstRows, phi: Tensor, mass: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """phi* and the attention mass of questions from those of their slots."""
        blocks = (block for block in self.blocks if isinstance(block, CrossAttentionBlock))
        weights = [weights for block in blocks if (weights := block.prior_weights) is not None]
        if mass is not None:
            shares = slots.shares(first, torch.stack(weights).mean()).to(phi)
            mass = torch.einsum("bsk,bs->bk", mass.unflatten(0, shares.shape), shares)
        return slots.marked(phi, slots.faintness(first).to(phi)), mass

    def prior_queries(self, question: MemoryTokens) -> Tensor | None:
        """What the document prior compares with its keys, `[B, d_prior]`; None if it is not in use."""
        return None if self.prior is None or not self.use_prior else self.prior.queries(question)

    def aggregate(
        self, question: MemoryTokens, attend: Attend, *, first: FirstRows | None = None, mass: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """As `forward`, for a bank that only `attend` reaches.

        Args:
            question, mass: as `forward` takes them.
            attend: attends; with `first`, each question is S of the queries, one after another.
            first: what the prior ranks first in all of the bank; None without slots in use.
        """
        tokens, shares = question.tokens, None
        if self.slots is not None and first is not None:
            tokens = tokens.repeat_interleave(self.slots.count, 0)
        for number, block in enumerate(self.blocks):
            with_mass = mass and number == len(self.blocks) - 1
            tokens, shares = block(tokens, partial(attend, number, with_mass))
        if self.slots is None:
            return tokens, shares
        if first is None:
            alike = tokens.repeat_interleave(self.slots.count, 0)
            return self.slots.marked(alike, tokens.new_zeros(len(tokens), self.slots.count)), shares
        return self._side_by_side(self.slots, first, tokens, shares)


class AttendedBank:
    """A bank as the blocks attend to it for B questions.

    It knows what is added to the logits, which is document prior, log counts of rows, and mask; and which rows can
    matter with it. With slots in use, each question is S of the queries, one after another.

    Args:
        network: the aggregation network.
        bank: K rows.
        queries: `[B, d_prior]`, see `AggregationNetwork.prior_queries`; None without a prior, or with `scores`.
        mask, scores, asked: as `AggregationNetwork.forward` takes them.
        dtype: dtype of what is added to the logits.

    Attributes:
        among: the recency term's candidates of all of the bank, if `bank` is a part of it; set it before anything is
            attended to. None if the bank is all.
        first_of_all: what the prior ranks first in all of the bank, likewise.

    Raises:
        ValueError: for rows without prior keys where there are queries.
    """

    def __init__(
        self,
        network: AggregationNetwork,
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
        self.log_counts = bank.log_counts
        self.slots = network.slots_in_use
        self._seen = mask
        self.mask = mask if mask is None or self.slots is None else mask.repeat_interleave(self.slots.count, 0)
        self.dtype = dtype

    def floor(self, number: int, query: Tensor) -> Tensor | None:
        """A lower bound `[B, H, S]` of the largest logits of queries `[B, H, S, d]`; None if it is of no use."""
        block = self.blocks[number]
        best = self._best(number, block)
        if best is None or best.bias is None:
            return None
        return (query @ best.keys[:, :, 0].mT).amax(-1) + best.bias

    def chunks(
        self, number: int, query: Tensor, *, mass: bool, floor: Tensor | None = None
    ) -> tuple[Iterator[Chunk], Tensor | None]:
        """What the queries `[B, H, S, d]` of a block attend to, and a lower bound `[B, H, S]` of their largest logits.

        With `mass`, these are all rows, and no bound, because no row is skipped where each has a mass.

        Args:
            number: number of the block.
            query: its queries.
            mass: see above.
            floor: the bound, where more rows than these are known; None for that of these rows.
        """
        if mass:
            floor = None
        elif floor is None:
            floor = self.floor(number, query)
        return self._chunks(number, self.blocks[number], query, floor), floor

    def _chunks(self, number: int, block: CrossAttentionBlock, query: Tensor, floor: Tensor | None) -> Iterator[Chunk]:
        """The bank as a block sees it; where a bound shows that most rows cannot matter, the others."""
        longest = None
        if floor is not None and is_bounded(self.bank):
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
                for index in needed.split(_GATHERED) if len(needed) else ():  # none, where others hold what matters
                    keys, values = self.bank.rows(number, index.cpu())
                    yield Chunk(keys, values, self._bias(block, query, index), longest[:, index])
                return
        start = 0
        for keys, values in self.bank.chunks(number):
            rows = slice(start, start + keys.shape[-3])
            start = rows.stop
            yield Chunk(keys, values, self._bias(block, query, rows), None if longest is None else longest[:, rows])

    def _best(self, number: int, block: CrossAttentionBlock) -> Chunk | None:
        """The row with the highest document prior for each question, as a block sees it; None where it is of no use.

        It tells early which others cannot matter. A GPU has attended to all rows before it would know, unless their
        keys and values are not there yet.
        """
        if self.queries is None or torch.is_grad_enabled():
            return None
        if self.log_counts is not None or not is_view(self.bank) or not self.bank.documents:
            return None
        if self.slots is not None and isinstance(self.prior_keys, Tensor) and self.prior_keys.ndim == 3:
            return None  # each question has rows of its own, and they are few
        if self.queries.device.type != "cpu" and not (is_bounded(self.bank) and not self.bank.cached):
            return None
        score, index = self._scores.max(1)
        ((keys, values),) = self.bank.select(index[:, None]).chunks(number)
        return Chunk(keys, values, block.prior_bias(score[:, None]))

    @cached_property
    def scores(self) -> Tensor:
        """The document prior's scores of all rows `[B, K]`; `-inf` for those that a question may not see."""
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
        """What the prior ranks first, of all of the bank once that is known; None without slots in use."""
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
        summaries = keys.dense if isinstance(keys, PriorKeys) else keys[..., :width]
        if not len(dates):  # of one process of several; its keys have no width
            summaries = summaries.new_empty(0, width)
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
        """The scores as the queries see them: those of each slot, where there are slots."""
        if self.first is None or self.slots is None:
            return self.scores
        return self.slots.scores(self.scores, self.first)

    def _bias(self, block: CrossAttentionBlock, query: Tensor, rows: slice | Tensor) -> Tensor | None:
        bias = None if self.prior is None else block.prior_bias(self._scores[:, rows])
        if self.log_counts is not None:
            counts = self.log_counts[..., rows].to(self.dtype)
            if counts.ndim == 2:
                counts = counts.repeat_interleave(len(query) // len(counts), 0)[:, None]
            bias = counts.expand(len(query), block.heads, -1) if bias is None else bias + counts
        if self.mask is not None:
            hidden = ~self.mask[:, None, rows].expand(-1, block.heads, -1)
            bias = torch.zeros_like(hidden, dtype=self.dtype) if bias is None else bias
            bias = bias.masked_fill(hidden, -torch.inf)
        return bias
