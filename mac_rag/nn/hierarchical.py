"""Hierarchical aggregation, Algorithm 3 of the paper: aggregates groups to modulations until a single one remains.

It is an approximation. Streaming attention, the default, needs as little memory and is exact; Algorithm 3 is here to
reproduce the paper's figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.attended_bank import AttendedBank
from mac_rag.nn.bank_view import BankProjection, BankRows, BankView
from mac_rag.nn.cross_attention import CrossAttentionBlock
from mac_rag.nn.memory_tokens import MemoryTokens

# Numbers held in memory at once: rows, their keys and values, and hidden states of the feed-forward networks.
_BUDGET = 1 << 21


@dataclass(frozen=True)
class _Rows:
    """Consecutive rows of one level.

    Attributes:
        memory: on the first level, keys and values of all blocks in turn, `[G, H, k, T, d]` each, where G is 1 or B; on
            higher levels, one tensor of modulations `[B, k, T, D]`. The third dimension from the right counts rows.
        scores: `[B, k]`, the document prior's scores; None without a prior.
    """

    memory: tuple[Tensor, ...]
    scores: Tensor | None

    def __len__(self) -> int:
        return self.memory[0].shape[-3]

    def __getitem__(self, rows: slice) -> _Rows:
        return _Rows(
            tuple(part[..., rows, :, :] for part in self.memory),
            None if self.scores is None else self.scores[:, rows],
        )

    def joined(self, other: _Rows) -> _Rows:
        """These rows followed by the other's."""
        return _Rows(
            tuple(torch.cat(parts, -3) for parts in zip(self.memory, other.memory, strict=True)),
            None if self.scores is None or other.scores is None else torch.cat([self.scores, other.scores], 1),
        )


def hierarchical(
    network: AggregationNetwork,
    question: MemoryTokens,
    bank: BankView,
    subgroup: int,
    *,
    asked: Tensor | None = None,
    budget: int = _BUDGET,
) -> Tensor:
    """Aggregates groups of M consecutive rows to one modulation each, then groups of these, until one remains.

    M counts modulations, that is rows of T tokens. The paper counts tokens; with M below 2 T tokens its loop would not
    end, because a group would hold no more than the modulation that replaces it. A bank of one row is aggregated once,
    and for a bank of at most M rows the result equals that of streaming attention.

    All levels run at the same time, each on the finished results of the level below, so memory grows only with the
    number of levels. Questions and groups are batched within a constant budget.

    The document prior keeps its meaning: a modulation's score is the log-sum-exp of its rows' scores, which include the
    recency term.

    Args:
        network: h_psi.
        question: B questions, encoded by the input encoder.
        bank: a view of K rows.
        subgroup: M, at least 2 (`AttentionConfig`): groups of one would never become fewer.
        asked: `[B]`, as for `AggregationNetwork.forward`.
        budget: numbers held in memory at once.

    Returns:
        phi* `[B, T, D]`.
    """
    level = _bank_rows(network, question, bank, asked)
    remaining = bank.documents
    while True:
        level = _aggregate_level(network, question, level, subgroup, budget)
        remaining = -(-remaining // subgroup)
        if remaining == 1:
            phi: Tensor = next(level).memory[0][:, 0]
            return phi


def _bank_rows(
    network: AggregationNetwork, question: MemoryTokens, bank: BankView, asked: Tensor | None
) -> Iterator[_Rows]:
    """The bank's rows as the first level needs them."""
    queries = network.prior_queries(question)
    scores = None
    if queries is not None:
        scores = AttendedBank(network, bank, queries, asked=asked, dtype=question.tokens.dtype).scores
    start = 0
    for parts in zip(*(bank.chunks(block) for block in range(len(network.blocks))), strict=True):
        memory = tuple(part if part.ndim == 5 else part[None] for keys_values in parts for part in keys_values)
        rows = slice(start, start + memory[0].shape[-3])
        start = rows.stop
        yield _Rows(memory, None if scores is None else scores[:, rows])


def _aggregate_level(
    network: AggregationNetwork, question: MemoryTokens, rows: Iterator[_Rows], subgroup: int, budget: int
) -> Iterator[_Rows]:
    """One level: a modulation for each group of `subgroup` rows, and one for the remaining rows at the end."""
    for piece in _whole_groups(network, question, rows, subgroup, budget):
        size = min(subgroup, len(piece))
        groups = len(piece) // size
        runs = len(piece.memory[0])
        together = len(question) // runs  # questions that see the same rows

        def spread(parts: Tensor, shape: tuple[int, ...] = (runs, together)) -> Tensor:
            """`[B, groups, ...] -> [G * groups * B / G, ...]`: each group becomes a run of questions."""
            gathered: Tensor = parts.unflatten(0, shape).transpose(1, 2).flatten(0, 2)
            return gathered

        scores = None if piece.scores is None else piece.scores.unflatten(1, (groups, size))
        memory = tuple(part.unflatten(-3, (groups, size)) for part in piece.memory)
        if len(memory) == 1:
            bank: BankRows = _Modulations(network, memory[0].flatten(0, 1), budget)
        else:
            keys_values = [part.transpose(1, 2).flatten(0, 1) for part in memory]
            bank = BankProjection(
                tuple(keys_values[::2]), tuple(keys_values[1::2]), None, chunk_rows=network.chunk_rows
            )
        phi, _ = network(
            MemoryTokens(spread(question.tokens[:, None].expand(-1, groups, -1, -1))),
            bank,
            scores=None if scores is None else spread(scores),
        )
        modulations = phi.unflatten(0, (runs, groups, together)).transpose(1, 2).flatten(0, 1)
        yield _Rows((modulations,), None if scores is None else scores.logsumexp(2))


def _whole_groups(
    network: AggregationNetwork, question: MemoryTokens, rows: Iterator[_Rows], subgroup: int, budget: int
) -> Iterator[_Rows]:
    """The rows in pieces of whole groups within the budget; at the end the rows that fill no group."""
    block = network.blocks[0]
    assert isinstance(block, CrossAttentionBlock)
    hidden = block.hidden_width * question.tokens.shape[0] * question.tokens.shape[1]
    held: _Rows | None = None
    for part in rows:
        held = part if held is None else held.joined(part)
        numbers = hidden + subgroup * sum(memory.numel() for memory in part.memory) // len(part)
        size = subgroup * max(1, budget // numbers)
        while len(held) >= size:
            yield held[:size]
            held = held[size:]
    if held is not None and len(held) >= subgroup:
        whole = len(held) // subgroup * subgroup
        yield held[:whole]
        held = held[whole:]
    if held is not None and len(held):
        yield held


class _Modulations:
    """Modulations `[G, k, T, D]` as rows of a bank; they are projected chunk by chunk, when attention reads them."""

    prior_keys = None
    dates = None

    def __init__(self, network: AggregationNetwork, phi: Tensor, budget: int) -> None:
        self.network = network
        self.phi = phi
        self.budget = budget

    def chunks(self, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        runs, _, tokens, _ = self.phi.shape
        layers = self.network.blocks[block]
        assert isinstance(layers, CrossAttentionBlock)
        step = max(1, self.budget // (2 * runs * tokens * layers.to_key.out_features))
        for part in self.phi.split(step, 1):
            keys, values = layers.project(self.network.bank_norm(part.flatten(0, 1)))
            yield keys.unflatten(1, (runs, -1)).transpose(0, 1), values.unflatten(1, (runs, -1)).transpose(0, 1)
