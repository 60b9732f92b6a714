"""Weights stored as 8-bit integers: matrices with one scale for each row, a quarter of fp32's size.

They are read back as floating-point numbers, so storage is all that this changes: what runs is an ordinary model whose
weights were rounded once (round to nearest, symmetric; the largest weight of a row becomes 127).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_SCALE = "int8_scale:"  # in front of a weight's name: its scales


def packed(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state with its floating-point tensors of two and more dimensions as int8, and their scales `[..., 1]`."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if tensor.ndim < 2 or not tensor.is_floating_point():
            result[name] = tensor.contiguous()
            continue
        values = tensor.float()
        scale = values.abs().amax(-1, keepdim=True) / 127
        # A row of zeros has no scale to divide by.
        result[name] = (values / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8)
        result[_SCALE + name] = scale
    return result


def unpacked(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `packed` packed, in float32; a state that was not packed stays as it is."""
    return {
        name: tensor.float() * stored[_SCALE + name] if _SCALE + name in stored else tensor
        for name, tensor in stored.items()
        if not name.startswith(_SCALE)
    }
