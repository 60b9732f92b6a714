"""The aggregation network h_psi: question tokens attend to the whole bank and become one phi* (equation 1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from mac_rag.nn.attended_bank import AttendedBank
from mac_rag.nn.attention import BankAttention, longest_keys, streaming_attention
from mac_rag.nn.bank_view import CHUNK_ROWS, BankProjection, BankRows, prior_keys
from mac_rag.nn.cross_attention import CrossAttentionBlock
from mac_rag.nn.memory_slots import FirstRows, Look, MemorySlots, RankedSlots
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.prior import DocumentPrior, RankedFirst, RecencyTerm
from mac_rag.nn.product_quantizer import ProductQuantizer

# Index of a block, True to compute the attention mass, and the block's queries `[B, H, S, d]` -> attended values and
# mass, as `BankAttention` returns them.
Attend: TypeAlias = Callable[[int, bool, Tensor], tuple[Tensor, Tensor | None]]


class AggregationNetwork(nn.Module):
    """h_psi: blocks of cross-attention from the question's tokens to the bank (section 3 and appendix A).

    No positions are added to the bank, so the result does not depend on the order of its documents.

    Args:
        width: D.
        blocks: number of cross-attention blocks; four in the paper.
        heads, head_width: 8 heads of 96 in the paper.
        feed_forward: hidden width of the feed-forward networks, as a multiple of D.
        prior_width: width of the document prior's space; 0 for the paper's network, which has no prior.
        prior_sharpness: factor on the document prior in attention, except in training. The prior's scales are learned
            over the documents of one batch; a document of a larger bank needs a sharper prior for the same share.
        sentence_token: True if the first token of each text is a sentence encoder's, which the document prior compares.
        lexical_vectors: R, number of lexical vectors of each text, which only the document prior reads; 0 for none.
        lexical_weight: weight of their product in the document prior.
        recency: True for a document prior in which newer documents on the same subject count more
            (`mac_rag.nn.prior`).
        slots: S, phi* has S times T tokens (`mac_rag.nn.memory_slots`).
        slot_cutoff, reading_cutoff: see `mac_rag.nn.memory_slots.MemorySlots`.
        readout: True makes phi* consist of memory tokens: the last block has no residual around its attention.
        chunk_rows: number of rows of a bank in memory that are attended to at a time.

    Attributes:
        use_prior: False leaves the document prior out of attention, to measure its effect.
        use_recency: False leaves the recency term out of the prior, to measure its effect.
        quantizer: codebooks for memory tokens in banks with rows `pq`; None if none were fitted.
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
        slot_cutoff: float | None = None,
        reading_cutoff: float | None = None,
        readout: bool = False,
        chunk_rows: int = CHUNK_ROWS,
    ) -> None:
        super().__init__()
        self.lexical_vectors = lexical_vectors
        self.chunk_rows = chunk_rows
        self.bank_norm = nn.LayerNorm(width)  # one for all blocks: they attend to the same bank
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
        self.slots = MemorySlots(slots, width, cutoff=slot_cutoff, reading_cutoff=reading_cutoff) if slots > 1 else None
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
        """Width of a row's summary (`summaries`); 0 without a document prior."""
        if self.prior is None:
            return 0
        heads = sum(block.heads for block in self.blocks if isinstance(block, CrossAttentionBlock))
        return self.prior.key.out_features + heads

    def summaries(self, phi: MemoryTokens) -> Tensor:
        """Summaries that tell which rows can matter to a question without reading the rows, `[K, summary_width]`.

        A summary holds the row's key of the document prior, without its lexical part, and for each block and head the
        largest norm of the row's keys.

        Args:
            phi: K rows.
        """
        if self.prior is None:
            return phi.tokens.new_empty(len(phi), 0)
        bank = self.bank_norm(phi.tokens)
        keys = (block.project_keys(bank) for block in self.blocks if isinstance(block, CrossAttentionBlock))
        prior_keys = self.prior.summary_keys(phi)
        return torch.cat([prior_keys, *(longest_keys(part).T.to(prior_keys.dtype) for part in keys)], 1)

    @property
    def recency_in_use(self) -> RecencyTerm | None:
        """The recency term, if attention uses it; otherwise None."""
        return self.recency if self.use_prior and self.use_recency else None

    @property
    def slots_in_use(self) -> MemorySlots | None:
        """The slots, if the document prior is in use; otherwise None, since all slots would then see the same."""
        return self.slots if self.use_prior else None

    def with_recency(self, scores: Tensor, keys: Tensor, dates: Tensor, asked: Tensor | None) -> Tensor:
        """The document prior's scores `[B, K]` with the recency term; unchanged if the term is not in use.

        Args:
            scores: the prior's scores.
            keys: the prior's keys, `[K, d_prior]`.
            dates: `[K]`, the documents' dates.
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
            ValueError: if the network has no document prior.
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
        look: Look | None = None,
        mass: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Aggregates the bank for each question.

        Args:
            question: B questions, encoded by the input encoder; their tokens are the first queries.
            bank: K rows.
            mask: `[B, K]`, True where a question may see a row; every question must see at least one.
            scores: `[B, K]`, the document prior's scores, if known; None computes them from question and prior keys,
                with the recency term if the bank has dates.
            asked: `[B]`, see `RecencyTerm.penalties`.
            attention: the strategy.
            look: looks at single slots, if the network has a `reading_cutoff`.
            mass: True also computes the attention mass.

        Returns:
            phi* `[B, T, D]`, with slots `[B, S T, D]`; and the last block's attention mass on each row `[B, K]`,
            averaged over slots by their shares of the prior, or None without `mass`.

        Raises:
            ValueError: if the document prior is in use, but there are neither scores nor prior keys.
        """
        queries = None if scores is not None else self.prior_queries(question)
        attended_bank = AttendedBank(
            self, bank, queries, mask=mask, scores=scores, asked=asked, dtype=question.tokens.dtype
        )
        attend = self._attending(attended_bank, attention)
        return self.aggregate(question, attend, first=attended_bank.first, look=look, mass=mass)

    @staticmethod
    def _attending(attended_bank: AttendedBank, attention: BankAttention) -> Attend:
        """The function through which the blocks attend to a bank."""

        def attend(number: int, mass: bool, query: Tensor) -> tuple[Tensor, Tensor | None]:
            chunks, rows, floor = attended_bank.chunks(number, query)
            attended, shares = attention(query, chunks, floor=floor, mass=mass)
            return attended, None if shares is None else attended_bank.of_all_rows(number, shares, rows, floor)

        return attend

    def _mean_prior_weight(self) -> Tensor:
        """Mean weight of the document prior over all heads of all blocks."""
        blocks = (block for block in self.blocks if isinstance(block, CrossAttentionBlock))
        return torch.stack([weights for block in blocks if (weights := block.prior_weights) is not None]).mean()

    def _through_blocks(self, tokens: Tensor, attend: Attend, mass: bool) -> tuple[Tensor, Tensor | None]:
        """Tokens `[B, T, D]` after all blocks, and the last block's attention mass, or None without `mass`."""
        shares = None
        for number, block in enumerate(self.blocks):
            tokens, shares = block(tokens, partial(attend, number, mass and number == len(self.blocks) - 1))
        return tokens, shares

    def _side_by_side(
        self, slots: MemorySlots, first: FirstRows, phi: Tensor, mass: Tensor | None, look: Look | None
    ) -> tuple[Tensor, Tensor | None]:
        """Combines phi* and attention mass of the slots to those of the questions."""
        ranked, order = slots.looked_at(slots.ranked(first), phi, look)
        if order is not None:
            places = (order + slots.count * torch.arange(len(order), device=order.device)[:, None]).flatten()
            phi, mass = phi[places], None if mass is None else mass[places]
        if mass is not None:
            shares = slots.shares(ranked, self._mean_prior_weight()).to(phi)
            mass = torch.einsum("bsk,bs->bk", mass.unflatten(0, shares.shape), shares)
        return slots.marked(phi, ranked), mass

    def prior_queries(self, question: MemoryTokens) -> Tensor | None:
        """Queries that the document prior compares with its keys, `[B, d_prior]`; None if it is not in use."""
        return None if self.prior is None or not self.use_prior else self.prior.queries(question)

    def aggregate(
        self,
        question: MemoryTokens,
        attend: Attend,
        *,
        first: FirstRows | None = None,
        look: Look | None = None,
        mass: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `forward`, for a bank that only `attend` reaches.

        Args:
            question, look, mass: as for `forward`.
            attend: attends to the bank; with `first`, each question has S consecutive queries.
            first: the rows that the prior ranks first in the whole bank; None if no slots are in use.
        """
        tokens = question.tokens
        if self.slots is not None and first is not None:
            tokens = tokens.repeat_interleave(self.slots.count, 0)
        tokens, shares = self._through_blocks(tokens, attend, mass)
        if self.slots is None:
            return tokens, shares
        if first is None:
            alike = tokens.repeat_interleave(self.slots.count, 0)
            of_slots = tokens.new_zeros(len(tokens), self.slots.count)
            return self.slots.marked(alike, RankedSlots(of_slots, of_slots.bool())), shares
        return self._side_by_side(self.slots, first, tokens, shares, look)
