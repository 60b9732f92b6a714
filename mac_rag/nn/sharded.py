"""Attention to a bank that is split over processes. Each attends to its own rows, and the parts merge exactly."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor, distributed

from mac_rag.nn.attention import Chunk, Partial, partial_attention
from mac_rag.nn.memory_slots import FirstRows
from mac_rag.nn.prior import Candidates


class ShardedAttention:
    """A `BankAttention` for a torch.distributed group whose processes hold rows of their own.

    All processes ask the same questions at the same time and get the same result: that of direct attention to the rows
    of all processes. Each block costs one collective of `[B, H, S, d + 2]` numbers from each process, whatever the size
    of the bank. A process may hold no rows. Gradients do not pass.

    Args:
        group: the process group; None for all processes.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self.group = group

    @torch.no_grad()
    def __call__(
        self, query: Tensor, chunks: Iterable[Chunk], *, floor: Tensor | None = None, mass: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """As `BankAttention`. The mass covers the rows of all processes, in the order of their ranks."""
        own = partial_attention(query, chunks, floor=floor, mass=mass)
        whole = reduce(Partial.merged, map(Partial.unpacked, self._gathered(own.packed)))
        return whole.attended.to(query.dtype), self._mass(own.mass(whole.lse)).to(query.dtype) if mass else None

    def total(self, count: int, device: torch.device) -> int:
        """The sum of a number over all processes; every process must take part."""
        return sum(int(part) for part in self._gathered(torch.tensor([count], device=device)))

    def all_candidates(self, own: Candidates) -> Candidates:
        """The recency term's candidates of all processes; a process may have none."""
        return Candidates.of_all([Candidates(*parts) for parts in zip(*map(self._gathered, own.padded()), strict=True)])

    def all_first_rows(self, own: FirstRows) -> FirstRows:
        """What the prior ranks first in the rows of all processes; a process may have none."""
        parts = [FirstRows(*parts) for parts in zip(*map(self._gathered, own), strict=True)]
        return FirstRows.of_all(parts, distributed.get_rank(self.group))

    def _mass(self, own: Tensor) -> Tensor:
        """The mass on the rows of all processes, side by side; processes may hold different numbers of rows."""
        counts = [int(count) for count in self._gathered(torch.tensor([own.shape[1]], device=own.device))]
        padded = torch.nn.functional.pad(own, (0, max(counts) - own.shape[1]))
        return torch.cat([part[:, :count] for part, count in zip(self._gathered(padded), counts, strict=True)], 1)

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(distributed.get_world_size(self.group))]
        distributed.all_gather(parts, tensor.contiguous(), group=self.group)
        return parts
