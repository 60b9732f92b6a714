"""Floating-point dtypes of networks used together: trained weights are fp32, frozen ones may be half precision."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor, nn

HALF_PRECISION = (torch.float16, torch.bfloat16)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask to be added to scores of a dtype: 0 where `mask` is True, and the dtype's lowest number elsewhere."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def widest_dtype(module: nn.Module) -> torch.dtype:
    """The dtype that can hold every floating-point weight of a module; float16 and bfloat16 together give float32.

    Examples:
        >>> mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
        >>> widest_dtype(mixed)
        torch.float32
    """
    kinds = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    return reduce(torch.promote_types, kinds)


def use_master_weights(module: nn.Module) -> None:
    """Converts trainable weights in half precision to fp32, in place; frozen weights keep their dtype.

    An optimiser's step is often smaller than half the distance between two neighbouring bf16 numbers: added to a bf16
    weight, it is lost. Call this before making the optimiser.

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
    """The token embeddings of another network, in the dtype of the network that borrows them.

    They still belong to the other network: they are no submodule here, and borrowing them adds no weights.

    Args:
        embedding: the other network's embeddings.
        borrower: the network that uses them.
    """

    def __init__(self, embedding: nn.Module, borrower: nn.Module) -> None:
        super().__init__()
        own = borrower.get_input_embeddings()  # type: ignore[operator]
        self._embedding = [embedding]  # in a list, where PyTorch does not look for submodules
        # Converting the borrower to another dtype changes this parameter in place.
        self._like = [next(p for p in borrower.parameters() if p is not own.weight and p.is_floating_point())]

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self._embedding[0].weight  # type: ignore[assignment]
        return weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """`[..., L] -> [..., L, width]`."""
        embedded: Tensor = self._embedding[0](input_ids)
        return embedded.to(self._like[0].dtype)
