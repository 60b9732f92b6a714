"""A memory bank under one aggregation network: keys and values of all blocks, projected once and kept up to date.

Keys and values do not depend on the question, so a question costs only attention. They follow the bank row by row: a
new document costs its own projection, a deleted one costs nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from mac_rag.bank.overview import Overview, computed_overview, keeps_overview, read_overviews
from mac_rag.errors import BankError
from mac_rag.nn.aggregation import AggregationNetwork
from mac_rag.nn.cross_attention import CrossAttentionBlock
from mac_rag.nn.memory_tokens import MemoryTokens
from mac_rag.nn.prior import PriorKeys

if TYPE_CHECKING:
    from mac_rag.bank.bank import Contents

# Positions among the rows that were asked for -> their keys and values, `[H, n, T, d]` each.
Projection: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _Piece:
    """Projections of consecutive rows of a bank.

    Attributes:
        row_keys: `[k]`, keys of the rows.
        projected: for each block the keys and values `[H, k, T, d]`.
    """

    row_keys: Tensor
    projected: tuple[tuple[Tensor, Tensor], ...]

    def filtered(self, mask: Tensor) -> _Piece:
        """Only the rows where `mask` `[k]` is True; the same object if these are all rows."""
        if mask.all():
            return self
        index = mask.nonzero()[:, 0]
        device_index = index.to(self.projected[0][0].device)
        return _Piece(
            self.row_keys[index],
            tuple(
                (keys.index_select(1, device_index), values.index_select(1, device_index))
                for keys, values in self.projected
            ),
        )


class ProjectedBank:
    """A memory bank under one aggregation network: a `BankView` whose rows are the bank's rows, in their order.

    Keys and values are cached if those of the whole bank fit into a budget. Otherwise they are projected when they are
    needed. Where a document prior tells the few rows that can matter, these are all that is read, and the budget keeps
    those that were needed last; else they are projected chunk by chunk, once per block and batch of questions. The keys
    of the document prior, and the norms that bound what a row can contribute, are always cached. On a CPU, and if the
    bank keeps what the prior needs to know of its rows, even a bank that fits is projected only as far as it is needed.

    A view shows one version of the bank: after a change of the bank, call `refresh`.

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
        self._needed: tuple[RowCache, ...] = ()  # for each block the rows that were needed last, unless all are cached
        self._pieces: list[_Piece] = []
        self.refresh()

    def refresh(self) -> None:
        """Follows the bank: projects new rows and drops deleted ones."""
        if self._version == self.bank.version:
            return
        version, row_keys = self.bank.version, self.bank.row_keys
        fits = len(row_keys) * self._row_bytes() <= self.budget_bytes
        prior, is_kept = self.network.prior is not None, keeps_overview(self.network, self.bank)
        # On a CPU a prior may have few rows read, so that projecting all of them can wait until a question needs them.
        projects = fits and (bool(self._pieces) or not (is_kept and self.device.type == "cpu"))
        # New rows come after all others, so the rows that are known already come first. A bank with another order, or
        # one that is projected for the first time, is read from the first unknown row on.
        is_known = torch.isin(row_keys, self._row_keys, assume_unique=True)
        first = int(is_known.long().cumprod(0).sum()) if self._pieces or not projects else 0
        remains = torch.isin(self._row_keys, row_keys[:first], assume_unique=True)
        pieces: list[_Piece] = []
        overviews = [] if self._overview is None else [self._overview.kept(remains.to(self.device))]
        if projects and self._pieces:
            parts = remains.split([len(piece.row_keys) for piece in self._pieces])
            pieces = [piece.filtered(part) for piece, part in zip(self._pieces, parts) if part.any()]
        if is_kept:
            overviews += read_overviews(
                self.network, self.bank, first, self._take, chunk_rows=self.chunk_rows, device=self.device
            )
        for start in range(first, len(row_keys), self.chunk_rows) if projects or (prior and not is_kept) else ():
            stop = min(start + self.chunk_rows, len(row_keys))
            phi = self._take(torch.arange(start, stop))
            if projects:
                pieces.append(_Piece(row_keys[start:stop], self._project(phi, self._blocks)))
            if prior and not is_kept:
                keys = [keys for keys, _ in pieces[-1].projected] if projects else None
                overviews.append(computed_overview(self.network, phi, keys))
        # Nothing above changes this view, so an error leaves it as it was.
        self._overview = Overview.cat(overviews) if overviews else None
        self._longest_of_all = self._dates = None
        self._pieces = _joined(pieces, self.chunk_rows)
        for rows_of_block in self._needed:
            rows_of_block.drop(self._row_keys[~remains])
        self._row_keys, self._version, self.cached = row_keys, version, fits
        if self._pieces:
            self._needed = ()
        elif not self._needed:
            rows = self.budget_bytes // max(1, self._row_bytes())
            self._needed = tuple(RowCache(rows) for _ in self._blocks)

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
    def _project(self, phi: MemoryTokens, blocks: Iterable[CrossAttentionBlock]) -> tuple[tuple[Tensor, Tensor], ...]:
        """Keys and values `[H, k, T, d]` of k rows, for each of the blocks."""
        normed = self.network.bank_norm(phi.tokens)
        projected = (block.project(normed) for block in blocks)
        return tuple((keys.to(self.dtype), values.to(self.dtype)) for keys, values in projected)

    @property
    def documents(self) -> int:
        """K, the number of rows of the bank."""
        return len(self._row_keys)

    @property
    def row_keys(self) -> Tensor:
        """Keys of the bank's rows, int64 `[K]`."""
        return self._row_keys

    @property
    def prior_keys(self) -> Tensor | None:
        """Keys of the document prior `[K, d_prior]`; None without a document prior.

        They are made at each access; nothing but a view without `compact_prior_keys` has need of them.
        """
        keys = self.compact_prior_keys
        return None if keys is None else keys.take(torch.arange(len(keys), device=self.device))

    @property
    def compact_prior_keys(self) -> PriorKeys | None:
        """The same without the zeros of lexical parts; None without a document prior."""
        if self._overview is None and self.network.prior is not None:
            return PriorKeys.of(torch.empty(0, 0, device=self.device), None)  # as one process of several may hold
        return None if self._overview is None else self._overview.prior_keys

    @property
    def dates(self) -> Tensor | None:
        """When each row counts, int64 `[K]`; None for a network without a recency term, which does not ask.

        Raises:
            BankError: when the bank has changed since the last `refresh`.
        """
        if self.network.recency is None:
            return None
        if self._dates is None:
            self._check()
            self._dates = self.bank.directory.row_dates.to(self.device)
        return self._dates

    def chunks(self, block: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values `[H, k, T, d]` of consecutive rows for block number `block`.

        Raises:
            BankError: when the bank has changed since the last `refresh`.
        """
        self._check()
        if self.cached:
            self._project_all()
            yield from (piece.projected[block] for piece in self._pieces)
            return
        for start in range(0, self.documents, self.chunk_rows):
            self._check()
            stop = min(start + self.chunk_rows, self.documents)
            # The memory tokens have no name here, so they are freed while their keys and values are attended to.
            (projected,) = self._project(self._take(torch.arange(start, stop)), [self._blocks[block]])
            yield projected

    def _project_all(self) -> None:
        """Projects all rows of a bank that fits into the budget, unless that is done."""
        if self._pieces:
            return
        for start in range(0, self.documents, self.chunk_rows):
            stop = min(start + self.chunk_rows, self.documents)
            projected = self._project(self._take(torch.arange(start, stop)), self._blocks)
            self._pieces.append(_Piece(self._row_keys[start:stop], projected))
        self._needed = ()

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
        """A view in which each question sees its own rows, numbered by `index` `[B, N]`, in that order.

        Raises:
            BankError: when the bank has changed since the last `refresh`.
        """
        self._check()
        return SelectedRows(self, index)

    def rows(self, block: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, n, T, d]` of some rows.

        Args:
            block: number of the block.
            index: `[n]` on the CPU, row numbers.

        Raises:
            BankError: when the bank has changed since the last `refresh`.
        """
        self._check()
        if not self._pieces:

            def project(places: Tensor) -> tuple[Tensor, Tensor]:
                return self._project(self._split(self.bank.take(index[places])), [self._blocks[block]])[0]

            return self._needed[block].look_up(self._row_keys[index], project)
        ends = torch.tensor([len(piece.row_keys) for piece in self._pieces]).cumsum(0)
        owner = torch.searchsorted(ends, index.contiguous(), right=True)
        first_keys, first_values = self._pieces[0].projected[block]
        keys, values = (
            first.new_empty(first.shape[0], len(index), *first.shape[2:]) for first in (first_keys, first_values)
        )
        for number in owner.unique().tolist():
            piece = self._pieces[number]
            target = (owner == number).nonzero()[:, 0]
            source = (index[target] - (ends[number] - len(piece.row_keys))).to(self.device)
            target = target.to(self.device)
            for gathered, tensor in zip((keys, values), piece.projected[block]):
                gathered[:, target] = tensor.index_select(1, source)
        return keys, values

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
    def prior_keys(self) -> Tensor | None:
        """Keys of the document prior `[B, N, d_prior]`; None without a document prior."""
        keys = self._bank.compact_prior_keys
        if keys is None:
            return None
        chosen: Tensor = keys.take(self._index.flatten().to(keys.dense.device)).unflatten(0, self._index.shape)
        return chosen

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


def _joined(pieces: Iterable[_Piece], limit: int) -> list[_Piece]:
    """Joins neighbours that fit into one piece, so that many small changes do not leave many small pieces."""
    joined: list[_Piece] = []
    for piece in pieces:
        if joined and len(joined[-1].row_keys) + len(piece.row_keys) <= limit:
            last = joined[-1]
            piece = _Piece(
                torch.cat([last.row_keys, piece.row_keys]),
                tuple(
                    (torch.cat([a[0], b[0]], 1), torch.cat([a[1], b[1]], 1))
                    for a, b in zip(last.projected, piece.projected)
                ),
            )
            joined[-1] = piece
        else:
            joined.append(piece)
    return joined


class RowCache:
    """Keys and values of one block, of the rows that questions needed last. What was not used for longest makes room.

    Args:
        capacity: number of rows; 0 keeps none.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slots: OrderedDict[int, int] = OrderedDict()  # key of a row -> its place; the last used one is the last
        self._emptied: list[int] = []  # places of rows that were dropped
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def look_up(self, row_keys: Tensor, project: Projection) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, n, T, d]` of n different rows.

        Args:
            row_keys: `[n]` on the CPU.
            project: computes those that are not kept.
        """
        if len(row_keys) > self.capacity:
            return project(torch.arange(len(row_keys)))
        names = row_keys.tolist()
        for name in names:
            if name in self._slots:
                self._slots.move_to_end(name)
        missing = torch.tensor([place for place, name in enumerate(names) if name not in self._slots], dtype=torch.long)
        if len(missing):
            keys, values = project(missing)
            if self._keys is None or self._values is None:
                # Memory that is never written is never taken from the system.
                self._keys, self._values = (
                    part.new_empty(part.shape[0], self.capacity, *part.shape[2:]) for part in (keys, values)
                )
            slots = torch.tensor([self._free_slot(names[place]) for place in missing.tolist()])
            self._keys[:, slots], self._values[:, slots] = keys, values
        assert self._keys is not None
        assert self._values is not None
        slots = torch.tensor([self._slots[name] for name in names], dtype=torch.long, device=self._keys.device)
        return self._keys.index_select(1, slots), self._values.index_select(1, slots)

    def drop(self, row_keys: Tensor) -> None:
        """Forgets rows `[n]`, and leaves out unknown ones. The next rows take their places, and no further memory."""
        for name in row_keys.tolist():
            slot = self._slots.pop(name, None)
            if slot is not None:
                self._emptied.append(slot)

    def _free_slot(self, name: int) -> int:
        if self._emptied:
            slot = self._emptied.pop()
        elif len(self._slots) == self.capacity:
            _, slot = self._slots.popitem(last=False)
        else:
            slot = len(self._slots)
        self._slots[name] = slot
        return slot
