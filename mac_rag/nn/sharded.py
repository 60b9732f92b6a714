"""Attention to a bank that is split over processes: each attends to its own rows, and the parts are merged exactly."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor, distributed

from mac_rag.nn.attention import Chunk, Partial, partial_attention


class ShardedAttention:
    """A `BankAttention` for the processes of a torch.distributed group, each of which holds rows of its own.

    All processes ask the same questions at the same time, and all get the same: what direct attention to the rows of
    all processes gives. One block costs one collective of `[B, H, S, d + 2]` numbers from each process, whatever the
    size of the bank. A process may hold no rows at all. Gradients do not pass.

    Args:
        group: None for all processes.
    """

    def __init__(self, group: distributed.ProcessGroup | None = None) -> None:
        self.group = group

    @torch.no_grad()
    def __call__(
        self, query: Tensor, chunks: Iterable[Chunk], *, floor: Tensor | None = None, mass: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """As `BankAttention`; the mass covers the rows of all processes, in the order of their ranks."""
        own = partial_attention(query, chunks, floor=floor, mass=mass)
        packed = torch.cat([own.weighted, own.total, own.maximum], -1)
        parts = [Partial(part[..., -1:], part[..., -2:-1], part[..., :-2], None) for part in self._gathered(packed)]
        whole = reduce(Partial.merged, parts)
        return whole.attended.to(query.dtype), self._mass(own.mass(whole.lse)).to(query.dtype) if mass else None

    def _mass(self, own: Tensor) -> Tensor:
        """The mass of all processes' rows side by side, of which each may have another number."""
        counts = [int(count) for count in self._gathered(torch.tensor([own.shape[1]], device=own.device))]
        padded = torch.nn.functional.pad(own, (0, max(counts) - own.shape[1]))
        return torch.cat([part[:, :count] for part, count in zip(self._gathered(padded), counts, strict=True)], 1)

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(distributed.get_world_size(self.group))]
        distributed.all_gather(parts, tensor.contiguous(), group=self.group)
        return parts
