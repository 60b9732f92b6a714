"""A bank as the aggregation network sees it: rows, with keys, values and prior keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

# Rows that a bank in memory gives at a time; bounds what is made for each chunk, such as the bias.
CHUNK_ROWS = 8192


class BankRows(Protocol):
    """Rows of a bank in a fixed order, as the aggregation network attends to them.

    A row is the memory tokens of one document, or of one part of a long one. Questions may all see the same rows, or
    each run of B / G questions has K rows of its own, which the tensors then have a leading dimension G for.
    """

    @property
    def prior_keys(self) -> Tensor | None:
        """Vectors of the document prior `[K, d_prior]` or `[G, K, d_prior]`; None without one."""

    @property
    def log_counts(self) -> Tensor | None:
        """Log of how many equal rows each row stands for, `[K]` or `[G, K]`; None for one each."""

    def chunks(self, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values `[H, k, T, d]` or `[G, H, k, T, d]` of consecutive rows, cut alike for all blocks."""


@runtime_checkable
class BankView(BankRows, Protocol):
    """A bank from which rows can be chosen."""

    @property
    def documents(self) -> int:
        """K, the number of rows (that each question sees)."""

    def longest(self, block: int) -> Tensor | None:
        """The largest norm of each row's keys `[H, K]`; None where it is not kept."""

    def select(self, index: Tensor) -> BankView:
        """The rows that `index` `[B, N]` names, N of its own for each question."""


@dataclass(frozen=True)
class BankProjection:
    """A bank in memory, projected. It depends on the bank alone, never on a question.

    Attributes:
        keys, values: for each block `[H, K, T, d]` or `[G, H, K, T, d]`.
        prior_keys, log_counts: as `BankView` has them.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    prior_keys: Tensor | None
    log_counts: Tensor | None = None

    @property
    def documents(self) -> int:
        return self.keys[0].shape[-3]

    def chunks(self, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.keys[block].split(CHUNK_ROWS, -3), self.values[block].split(CHUNK_ROWS, -3), strict=True)

    def longest(self, block: int) -> None:
        """Not kept."""

    def select(self, index: Tensor) -> BankProjection:
        per_row = (self.prior_keys, self.log_counts)
        if self.keys[0].ndim == 4:
            keys, values = (tuple(rows[:, index].transpose(0, 1) for rows in part) for part in (self.keys, self.values))
            return BankProjection(keys, values, *(None if part is None else part[index] for part in per_row))
        run = torch.arange(len(index), device=index.device)[:, None] // (len(index) // len(self.keys[0]))
        keys, values = (
            tuple(rows[run, :, index].transpose(1, 2) for rows in part) for part in (self.keys, self.values)
        )
        return BankProjection(keys, values, *(None if part is None else part[run, index] for part in per_row))


def prior_keys(bank: BankRows) -> Tensor:
    """The rows' keys of the document prior.

    Raises:
        ValueError: where they have none.
    """
    if bank.prior_keys is None:
        raise ValueError("this view of a bank has no prior keys, which the network's document prior needs")
    return bank.prior_keys
