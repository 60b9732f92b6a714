"""Floating-point types where networks of several types meet: what is trained is fp32, what is frozen may be half."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor, nn

HALF_PRECISION = (torch.float16, torch.bfloat16)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to be added to scores of a type: 0 where `mask` is True, and the type's lowest number elsewhere."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def widest_dtype(module: nn.Module) -> torch.dtype:
    """The floating-point type that holds every floating-point weight of a module; float16 and bfloat16 give float32.

    Examples:
        >>> mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
        >>> widest_dtype(mixed)
        torch.float32
    """
    kinds = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    return reduce(torch.promote_types, kinds)


def use_master_weights(module: nn.Module) -> None:
    """Makes trainable weights in half precision fp32, in place; frozen weights keep their type.

    An optimiser's step is often smaller than half the distance between two neighbouring bf16 numbers: added to a bf16
    weight, it is lost. Call it before the optimiser is made.

    Examples:
        >>> layer = nn.Linear(2, 2).bfloat16()
        >>> use_master_weights(layer.requires_grad_(True))
        >>> layer.weight.dtype
        torch.float32
    """
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.dtype in HALF_PRECISION:
            parameter.data = parameter.data.float()


class SharedEmbedding(nn.Module):
    """The token embeddings of another network, in the type of the network that borrows them.

    They stay the other network's: they are no submodule, and borrowing them adds no weights.

    Args:
        embedding: the other network's embeddings.
        borrower: the network that reads with them.
    """

    def __init__(self, embedding: nn.Module, borrower: nn.Module) -> None:
        super().__init__()
        own = borrower.get_input_embeddings()  # type: ignore[operator]
        self._embedding = [embedding]  # in a list, where PyTorch looks for no submodule
        # Whatever turns the borrower into another type changes this parameter in place.
        self._like = [next(p for p in borrower.parameters() if p is not own.weight and p.is_floating_point())]

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self._embedding[0].weight  # type: ignore[assignment]
        return weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """`[..., L] -> [..., L, width]`."""
        embedded: Tensor = self._embedding[0](input_ids)
        return embedded.to(self._like[0].dtype)
