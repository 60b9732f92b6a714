"""A cache of keys and values that grows in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_LEAST_SPARE = 32  # positions; or a quarter of the contents if that is more


class GrowingLayer(DynamicLayer):
    """Cache of one layer's keys and values, at the beginning of buffers with room for more.

    Transformers' own layer concatenates old and new into new tensors at every token, which takes a third of the time
    for a batch of short answers after a prefix. This layer writes in place, unless gradients need what it held.

    Args:
        keys, values: `[B, kv_heads, L, head_width]`, the initial contents; or buffers that begin with them.
        length: L, if these are buffers.
    """

    def __init__(self, keys: Tensor, values: Tensor, length: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lazy_initialization(keys, values)
        self._key_buffer, self._value_buffer = keys, values
        self.keys: Tensor = keys[..., :length, :]
        self.values: Tensor = values[..., :length, :]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if any(part.requires_grad for part in (self.keys, self.values, key_states, value_states)):
            self.keys = torch.cat([self.keys, key_states], -2)
            self.values = torch.cat([self.values, value_states], -2)
            return self.keys, self.values
        length = self.keys.shape[-2] + key_states.shape[-2]
        self._key_buffer = _with_room(self._key_buffer, self.keys, length)
        self._value_buffer = _with_room(self._value_buffer, self.values, length)
        self.keys = _appended(self._key_buffer, key_states, length)
        self.values = _appended(self._value_buffer, value_states, length)
        return self.keys, self.values


def growing(cache: Any) -> Any:
    """Replaces transformers' plain layers of a cache by layers that grow in place; returns the cache.

    Layers of other kinds, such as those with a sliding window or a state, stay as they are.
    """
    for number, layer in enumerate(getattr(cache, "layers", ())):
        if type(layer) is DynamicLayer and layer.keys is not None and layer.values is not None:
            cache.layers[number] = GrowingLayer(layer.keys, layer.values)
    return cache


class Taken(NamedTuple):
    """What is taken of rows in a cache.

    Attributes:
        rows: `[b]`, indices of the rows; an index may repeat.
        front, back: numbers of first and of last positions.
    """

    rows: Tensor
    front: int
    back: int


def is_growing(cache: Any) -> bool:
    """True for a cache whose layers all grow in place; only its rows can stand beside those of another one."""
    layers = getattr(cache, "layers", ())
    return bool(layers) and all(isinstance(layer, GrowingLayer) for layer in layers)


def side_by_side(caches: Sequence[DynamicCache], taken: Sequence[Taken]) -> DynamicCache:
    """One cache of rows from several, for which `is_growing` holds; see `stacked`."""
    made = DynamicCache()
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        parts: Any = [(layer.keys, layer.values) for layer in layers]
        length = max(one.front for one in taken) + max(one.back for one in taken)
        keys, values = (stacked(some, taken, with_spare(length)) for some in zip(*parts, strict=True))
        made.layers.append(GrowingLayer(keys, values, length))
    return made


def stacked(parts: Sequence[Tensor], taken: Sequence[Taken], length: int | None = None) -> Tensor:
    """Rows of several tensors as one tensor `[B, ..., T, width]`.

    The longest front and the longest back together are the first T' positions. Each row has its front at their
    beginning, its back at their end, and zeros between the two.

    Args:
        parts: `[b, ..., t, width]` each.
        taken: what is taken of each of them.
        length: T, if it is more than T'; what follows T' is not initialized.

    Examples:
        >>> one, two = torch.tensor([[[1], [2], [3]]]), torch.tensor([[[4], [5]]])
        >>> row = torch.tensor([0])
        >>> stacked([one, two], [Taken(row, 1, 2), Taken(row, 0, 1)])[..., 0].tolist()
        [[1, 2, 3], [0, 0, 5]]
    """
    used = max(one.front for one in taken) + max(one.back for one in taken)
    shape = list(parts[0].shape)
    shape[0], shape[-2] = sum(len(one.rows) for one in taken), used if length is None else length
    made, first = parts[0].new_empty(shape), 0
    for part, (indices, front, back) in zip(parts, taken, strict=True):
        rows, first = made[first : first + len(indices)], first + len(indices)
        some = part[indices.to(part.device)]
        rows[..., :front, :] = some[..., :front, :]
        rows[..., front : used - back, :] = 0
        rows[..., used - back : used, :] = some[..., some.shape[-2] - back :, :]
    return made


def with_spare(length: int) -> int:
    """Positions of a buffer for so many, with room for more."""
    return length + max(_LEAST_SPARE, length // 4)


def _with_room(buffer: Tensor, held: Tensor, length: int) -> Tensor:
    """A buffer that begins with `held` and has at least `length` positions; `buffer` itself if it meets both."""
    if buffer.data_ptr() == held.data_ptr() and len(buffer) == len(held) and buffer.shape[-2] >= length:
        return buffer
    # After rows were reordered or dropped, `held` no longer lies in the buffer.
    new = held.new_empty(*held.shape[:-2], with_spare(length), held.shape[-1])
    new[..., : held.shape[-2], :] = held
    return new


def _appended(buffer: Tensor, states: Tensor, length: int) -> Tensor:
    """Writes states into a buffer so that they end at `length`; returns its first `length` positions."""
    buffer[..., length - states.shape[-2] : length, :] = states
    return buffer[..., :length, :]
