"""A memory bank under one aggregation network: keys and values of all blocks, projected once and kept up to date.

Keys and values do not depend on the question, so a question costs only attention. They follow the bank row by row: a
new document costs its own projection, a deleted one costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from mac_rag.bank.directory import followed
from mac_rag.bank.overview import Overview, read_overviews
from mac_rag.errors import BankError
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.cross_attention import CrossAttentionBlock
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.prior import ChosenKeys, PriorKeys

if TYPE_CHECKING:
    from mac_rag.bank.bank import Contents

Projected: TypeAlias = list[tuple[Tensor, Tensor]]  # for each block keys and values `[H, n, T, d]` of n rows


class ProjectedBank:
    """A memory bank under one aggregation network: a `BankView` whose rows are the bank's rows, in their order.

    Keys and values are projected when they are needed. If those of the whole bank fit into a budget, none is projected
    twice. Otherwise, where a document prior tells the few rows that can matter, these are all that is read, and the
    budget keeps those that were needed last; without one, rows are projected chunk by chunk, once per block and batch
    of questions. The keys of the document prior, and the norms that bound what a row can contribute, are always cached.

    A view shows one version of the bank: after a change of the bank, call `refresh`. Until then, whatever has to read
    the bank raises BankError.

    Args:
        network: the aggregation network; its weights must not change while the view is in use.
        bank: the bank to follow.
        device: device of the network and of cached keys and values.
        dtype: dtype of keys and values; they are computed in the network's dtype.
        budget_bytes: maximum bytes of cached keys and values.
        chunk_rows: number of rows that are projected and attended to at a time.

    Attributes:
        cached: True if the keys and values of all rows fit into the budget, so that none is projected twice.
    """

    def __init__(
        self,
        network: AggregationNetwork,
        bank: Contents,
        *,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        budget_bytes: int = 2 << 30,
        chunk_rows: int = 256,
    ) -> None:
        self.network = network
        self.bank = bank
        self.device = torch.device(device)
        self.dtype = dtype
        self.budget_bytes = budget_bytes
        self.chunk_rows = chunk_rows
        self.cached = True
        self._blocks = [block for block in network.blocks if isinstance(block, CrossAttentionBlock)]
        self._weights = self._blocks[0].to_key.weight.dtype
        self._version: int | None = None
        self._row_keys = torch.empty(0, dtype=torch.int64)
        self._overview: Overview | None = None
        self._longest_of_all: Tensor | None = None
        self._dates: Tensor | None = None
        self._cache = RowCache()
        self.refresh()

    def refresh(self) -> None:
        """Follows the bank: learns what is known of new rows without their keys and values, and drops deleted rows."""
        if self._version == self.bank.version:
            return
        version, row_keys = self.bank.version, self.bank.row_keys
        first, remains = followed(self._row_keys, row_keys)
        overviews = [] if self._overview is None else [self._overview.kept(remains.to(self.device))]
        if self.network.prior is not None:
            overviews += read_overviews(
                self.network, self.bank, first, self._take, chunk_rows=self.chunk_rows, device=self.device
            )
        # Nothing above changes this view, so an error leaves it as it was.
        self._overview = Overview.cat(overviews) if overviews else None
        self._longest_of_all = self._dates = None
        capacity = self.budget_bytes // max(1, self._row_bytes())
        self._cache.follow(remains, len(row_keys), capacity)
        self._row_keys, self._version, self.cached = row_keys, version, len(row_keys) <= capacity

    @property
    def row_tokens(self) -> int:
        """T, the tokens of a row that are attended to; 0 for an empty bank."""
        if self.bank.row_shape is None:
            return 0
        return self._split(torch.empty(0, *self.bank.row_shape)).tokens.shape[1]

    def _row_bytes(self) -> int:
        """Bytes of the keys and values of a row, all blocks together."""
        width = sum(block.to_key.out_features + block.to_value.out_features for block in self._blocks)
        return self.row_tokens * width * self.dtype.itemsize

    def _take(self, index: Tensor) -> MemoryTokens:
        return self._split(self.bank.take(index))

    def _split(self, rows: Tensor) -> MemoryTokens:
        """The bank's rows `[k, T + R, D]` as the network takes them."""
        return MemoryTokens.split(rows.to(self.device, self._weights), self.network.lexical_vectors)

    @torch.no_grad()
    def _project(self, phi: MemoryTokens, blocks: Iterable[CrossAttentionBlock]) -> Projected:
        """Keys and values of rows, for each of the blocks."""
        normed = self.network.bank_norm(phi.tokens)
        projected = (block.project(normed) for block in blocks)
        return [(keys.to(self.dtype), values.to(self.dtype)) for keys, values in projected]

    def _projected(self, index: Tensor) -> Projected:
        return self._project(self._take(index), self._blocks)

    @property
    def documents(self) -> int:
        """K, the number of rows of the bank."""
        return len(self._row_keys)

    @property
    def prior_keys(self) -> PriorKeys | None:
        """Keys of the document prior; None without a document prior."""
        if self._overview is None and self.network.prior is not None:
            return PriorKeys.of(torch.empty(0, 0, device=self.device), None)  # as one process of several may hold
        return None if self._overview is None else self._overview.prior_keys

    @property
    def dates(self) -> Tensor | None:
        """When each row counts, int64 `[K]`; None for a network without a recency term, which does not ask."""
        if self.network.recency is None:
            return None
        if self._dates is None:
            self._check()
            self._dates = self.bank.directory.row_dates.to(self.device)
        return self._dates

    def chunks(self, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values `[H, k, T, d]` of consecutive rows for block number `block`."""
        self._check()
        if not self.documents:
            return
        if self.cached:
            keys, values = self._cache.whole(block, self.chunk_rows, self._projected)
            yield from zip(keys.split(self.chunk_rows, 1), values.split(self.chunk_rows, 1), strict=True)
            return
        for some in torch.arange(self.documents).split(self.chunk_rows):
            self._check()
            # The memory tokens have no name here, so they are freed while their keys and values are attended to.
            (projected,) = self._project(self._take(some), [self._blocks[block]])
            yield projected

    def longest(self, block: int) -> Tensor:
        """The largest norm of each row's keys in a block, `[H, K]`; only for a network with a document prior."""
        assert self._overview is not None
        return self._of_block(self._overview.longest, block).T

    def longest_of_all(self, block: int) -> Tensor:
        """The largest norm of all keys in a block, `[H]`; only for a network with a document prior."""
        assert self._overview is not None
        if self._longest_of_all is None:
            self._longest_of_all = self._overview.longest.amax(0)
        return self._of_block(self._longest_of_all, block)

    def _of_block(self, norms: Tensor, block: int) -> Tensor:
        """Those of one block, of norms `[..., blocks H]`."""
        of_block: Tensor = norms.split([each.heads for each in self._blocks], -1)[block]
        return of_block

    def select(self, index: Tensor) -> SelectedRows:
        """A view in which each question sees its own rows, numbered by `index` `[B, N]`, in that order."""
        self._check()
        return SelectedRows(self, index)

    def rows(self, block: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, n, T, d]` of the rows `index` `[n]`, a tensor on the CPU, in one block."""
        self._check()
        if len(index) > self._cache.capacity:
            (projected,) = self._project(self._take(index), [self._blocks[block]])
            return projected
        return self._cache.rows(block, index, self._projected)

    def _check(self) -> None:
        if self._version != self.bank.version:
            raise BankError(
                f"the bank is at version {self.bank.version}, its projection at {self._version}; refresh() it first"
            )


class SelectedRows:
    """A `BankView` in which each question has its own N rows, gathered or projected when they are attended to.

    Args:
        bank: the view that the rows are selected from.
        index: `[B, N]`, row numbers.
    """

    def __init__(self, bank: ProjectedBank, index: Tensor) -> None:
        self._bank = bank
        self._index = index.cpu()

    @property
    def documents(self) -> int:
        """N, the number of rows of each question."""
        return self._index.shape[1]

    @property
    def prior_keys(self) -> ChosenKeys | None:
        """Keys of the document prior, of each question's rows; None without a document prior."""
        keys = self._bank.prior_keys
        return None if keys is None else ChosenKeys(keys, self._index.to(keys.device))

    @property
    def dates(self) -> Tensor | None:
        """When each row counts, int64 `[B, N]`; None for a network without a recency term."""
        dates = self._bank.dates
        return None if dates is None else dates[self._index.to(dates.device)]

    def chunks(self, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values `[B, H, k, T, d]`; a chunk has as many rows over all questions as one of the bank."""
        questions, rows = self._index.shape
        step = max(1, self._bank.chunk_rows // max(1, questions))
        for start in range(0, rows, step):
            part = self._index[:, start : start + step]
            # Rows that several questions selected are projected once.
            unique, inverse = part.unique(return_inverse=True)
            keys, values = self._bank.rows(block, unique)
            inverse = inverse.to(keys.device)
            yield keys[:, inverse].transpose(0, 1), values[:, inverse].transpose(0, 1)

    def select(self, index: Tensor) -> SelectedRows:
        """A view in which each question sees some of its rows; `index` `[B, n]` counts within its N rows."""
        return SelectedRows(self._bank, self._index.gather(1, index.cpu()))


class RowCache:
    """Keys and values of rows in all blocks, by the numbers of the rows. What was not used for longest makes room.

    Attributes:
        capacity: the most rows that are kept.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self._slots = torch.empty(0, dtype=torch.long)  # by row: where it is; -1 if it is not kept
        self._clear()

    def _clear(self) -> None:
        self._rows = torch.empty(0, dtype=torch.long)  # by slot: its row; -1 if it is free
        self._used = torch.empty(0, dtype=torch.long)  # by slot: when it was last needed; -1 if it is free
        self._now = 0
        self._kept: list[list[Tensor]] = []  # for each block keys and values `[H, slots, T, d]`

    def follow(self, remains: Tensor, rows: int, capacity: int) -> None:
        """Goes on with another version of the bank.

        Args:
            remains: bool `[K]`, which of the rows are still there; they come first.
            rows: the number of rows now.
            capacity: the most rows that are kept.
        """
        former = self._slots[remains]
        self.capacity, self._slots = capacity, torch.full((rows,), -1)
        self._slots[: len(former)] = former
        kept = (self._slots >= 0).nonzero()[:, 0]
        if not len(kept):
            self._clear()
        self._rows.fill_(-1)
        self._rows[self._slots[kept]] = kept
        self._used[self._rows < 0] = -1

    def rows(self, block: int, index: Tensor, project: Callable[[Tensor], Projected]) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, n, T, d]` of rows in one block.

        Args:
            block: number of the block.
            index: `[n]` on the CPU, different rows, at most `capacity`.
            project: computes those that are not kept.
        """
        slots = self._slots[index]
        self._now += 1
        self._used[slots[slots >= 0]] = self._now
        self._add(index[slots < 0], project)
        keys, values = self._kept[block]
        slots = self._slots[index].to(keys.device)
        return keys.index_select(1, slots), values.index_select(1, slots)

    def whole(self, block: int, step: int, project: Callable[[Tensor], Projected]) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, K, T, d]` of all rows in one block, if they fit; `step` rows are computed at a time."""
        for missing in (self._slots < 0).nonzero()[:, 0].split(step):
            self._add(missing, project)
        order = torch.arange(len(self._slots))
        if not torch.equal(self._slots, order):
            self._kept = [[part[:, self._slots.to(part.device)] for part in pair] for pair in self._kept]
            self._used, self._rows, self._slots = self._used[self._slots], order.clone(), order
        keys, values = (part[:, : len(order)] for part in self._kept[block])
        return keys, values

    def _add(self, index: Tensor, project: Callable[[Tensor], Projected]) -> None:
        """Keeps rows that are not kept yet."""
        if not len(index):
            return
        projected = project(index)
        slots = self._room(len(index), projected)
        self._slots[index], self._rows[slots], self._used[slots] = slots, index, self._now
        for kept, new in zip(self._kept, projected, strict=True):
            for whole, part in zip(kept, new, strict=True):
                whole[:, slots.to(whole.device)] = part

    def _room(self, count: int, projected: Projected) -> Tensor:
        """Slots `[count]` for new rows."""
        size, free = len(self._rows), (self._rows < 0).nonzero()[:, 0]
        if len(free) < count and size < self.capacity:
            more = min(self.capacity, max(2 * size, len(self._slots))) - size
            self._kept = self._kept or [[part[:, :0] for part in pair] for pair in projected]
            self._kept = [[_longer(part, more) for part in pair] for pair in self._kept]
            self._rows, self._used = (torch.cat([part, torch.full((more,), -1)]) for part in (self._rows, self._used))
            free = (self._rows < 0).nonzero()[:, 0]
        if len(free) < count:
            free = self._used.topk(count, largest=False).indices
            evicted = self._rows[free]
            self._slots[evicted[evicted >= 0]] = -1
        return free[:count]


def _longer(rows: Tensor, more: int) -> Tensor:
    """A copy of `[H, n, T, d]` with room for more rows. Memory that is never written is never taken from the system."""
    longer = rows.new_empty(rows.shape[0], rows.shape[1] + more, *rows.shape[2:])
    longer[:, : rows.shape[1]] = rows
    return longer
