"""A bank as the aggregation network sees it: rows, with keys, values and prior keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from mac_rag.nn.prior import ChosenKeys, PriorKeys

CHUNK_ROWS = 8192


class BankRows(Protocol):
    """Rows of a bank in a fixed order, as the aggregation network attends to them.

    A row is the memory tokens of one document, or of one part of a long one. Either all questions see the same rows, or
    each run of B / G questions has its own K rows; then the tensors have a leading dimension G.
    """

    @property
    def prior_keys(self) -> Tensor | PriorKeys | ChosenKeys | None:
        """The rows' keys of the document prior, as a tensor `[K, d_prior]` or `[G, K, d_prior]`; None without one."""

    @property
    def dates(self) -> Tensor | None:
        """Date of each row's document, int64 `[K]` or `[G, K]`, in microseconds since 1970; None if unknown."""

    def chunks(self, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values `[H, k, T, d]` or `[G, H, k, T, d]` of consecutive rows, cut equally for all blocks."""


class BankView(BankRows, Protocol):
    """A bank from which rows can be chosen."""

    @property
    def documents(self) -> int:
        """K, number of rows that each question sees."""

    def select(self, index: Tensor) -> BankView:
        """A view in which each question sees its own N rows, in the order of `index` `[B, N]`."""


class BoundedView(BankView, Protocol):
    """A bank that bounds what each row can contribute, and can read some rows without the others."""

    @property
    def cached(self) -> bool:
        """True if keys and values are computed once; False if they are computed at each access."""

    @property
    def row_tokens(self) -> int:
        """T, number of tokens of a row."""

    def longest(self, block: int) -> Tensor:
        """The largest norm of each row's keys, `[H, K]`."""

    def longest_of_all(self, block: int) -> Tensor:
        """The largest norm of all keys, `[H]`."""

    def rows(self, block: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, n, T, d]` of the rows `index` `[n]`, a tensor on the CPU."""


# `isinstance` with a protocol would compute each of its properties.
def is_view(bank: BankRows) -> TypeGuard[BankView]:
    """True if rows can be chosen from a bank."""
    return hasattr(type(bank), "select")


def is_bounded(bank: BankRows) -> TypeGuard[BoundedView]:
    """True if a bank bounds what each row can contribute."""
    return hasattr(type(bank), "longest")


@dataclass(frozen=True)
class BankProjection:
    """A bank in memory, projected. It depends on the bank alone, never on a question.

    Attributes:
        keys, values: `[H, K, T, d]` or `[G, H, K, T, d]` for each block.
        prior_keys, dates: as in `BankView`.
        chunk_rows: number of rows of a chunk; bounds the memory of what is computed per chunk, such as the bias.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    prior_keys: Tensor | None
    chunk_rows: int = CHUNK_ROWS
    dates: Tensor | None = None

    @property
    def documents(self) -> int:
        return self.keys[0].shape[-3]

    def chunks(self, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        keys, values = (part[block].split(self.chunk_rows, -3) for part in (self.keys, self.values))
        yield from zip(keys, values, strict=True)

    def select(self, index: Tensor) -> BankProjection:
        per_row = (self.prior_keys, self.dates)
        if self.keys[0].ndim == 4:
            keys, values = (tuple(rows[:, index].transpose(0, 1) for rows in part) for part in (self.keys, self.values))
            chosen_keys, dates = (None if part is None else part[index] for part in per_row)
            return BankProjection(keys, values, chosen_keys, self.chunk_rows, dates)
        run = torch.arange(len(index), device=index.device)[:, None] // (len(index) // len(self.keys[0]))
        keys, values = (
            tuple(rows[run, :, index].transpose(1, 2) for rows in part) for part in (self.keys, self.values)
        )
        chosen_keys, dates = (None if part is None else part[run, index] for part in per_row)
        return BankProjection(keys, values, chosen_keys, self.chunk_rows, dates)


def prior_keys(bank: BankRows) -> Tensor | PriorKeys | ChosenKeys:
    """The rows' keys of the document prior.

    Raises:
        ValueError: for rows without prior keys.
    """
    keys = bank.prior_keys
    if keys is None:
        raise ValueError("this view of a bank has no prior keys, which the network's document prior needs")
    return keys
