"""Keys and values of the rows that questions needed last, for banks whose keys and values are not all kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

# Positions among the rows that were asked for -> their keys and values, `[H, n, T, d]` each.
Projection: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]


class RowCache:
    """Keys and values of one block, of at most so many rows. What was not used for longest makes room.

    Args:
        capacity: number of rows; 0 keeps none.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._slots: OrderedDict[int, int] = OrderedDict()  # key of a row -> its place; the last used one is the last
        self._emptied: list[int] = []  # places of rows that were dropped
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values that are kept."""
        if self._keys is None or self._values is None:
            return 0
        return len(self._slots) * (self._keys[:, :1].numel() + self._values[:, :1].numel()) * self._keys.itemsize

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
