"""Weights stored as 8-bit integers: matrices with one scale for each row or each column, a quarter of fp32's size.

Loading converts them back to floating-point numbers, so only storage changes: the model that runs is an ordinary one
whose weights were rounded once (to nearest, symmetric; the largest weight of a row, or column, becomes 127).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_SCALE = "int8_scale:"  # prefix of a weight's name that gives the name of its scales


def to_int8(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state with its floating-point tensors of two or more dimensions as int8, and with their scales.

    The scales are `[..., 1]` or `[..., 1, columns]`, whichever loses less. If a few columns are much larger than the
    rest, as in BERT's position embeddings, they would determine the scale of every row.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if tensor.ndim < 2 or not tensor.is_floating_point():
            result[name] = tensor.contiguous()
            continue
        values = tensor.float()
        choices = [_rounded(values, dim) for dim in (-1, -2)]
        losses = [float((whole * scale - values).square().sum()) for whole, scale in choices]
        result[name], result[_SCALE + name] = choices[losses.index(min(losses))]
    return result


def _rounded(values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Integers, and their scales: one for all values along `dim`."""
    scale = values.abs().amax(dim, keepdim=True) / 127
    # If all values are zero, the scale is zero and must not divide.
    return (values / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8), scale


def from_int8(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state in float32 from the result of `to_int8`; a state without int8 weights stays as it is.

    Raises:
        ValueError: for scales that do not fit their weights.
    """
    for name, tensor in stored.items():
        scale = stored.get(_SCALE + name)
        if scale is not None and (scale.ndim != tensor.ndim or any(map(_differ, scale.shape, tensor.shape))):
            raise ValueError(f"{name} is {list(tensor.shape)}, and its scales are {list(scale.shape)}")
    return {
        name: tensor.float() * stored[_SCALE + name] if _SCALE + name in stored else tensor
        for name, tensor in stored.items()
        if not name.startswith(_SCALE)
    }


def _differ(scales: int, weights: int) -> bool:
    return scales not in (1, weights)
