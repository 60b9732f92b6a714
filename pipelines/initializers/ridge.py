"""Ridge regression over samples that need not be in memory together."""

from __future__ import annotations

import torch
from torch import Tensor

_RIDGE = 1e-4  # ridge penalty, as a share of the inputs' mean square


class Ridge:
    """The linear map of least squared error from inputs `[N, D]` to outputs `[N, E]`, which come in parts.

    It keeps the sums of products `[D, D]` and `[D, E]` in float64, and no sample.

    Examples:
        >>> inputs = torch.randn(64, 3)
        >>> ridge = Ridge(3, 3)
        >>> for part in inputs.split(10):
        ...     ridge.add(part, 2 * part + 1)
        >>> weight, bias = ridge.solve()
        >>> weight.diagonal().round(decimals=2), bias.round(decimals=2)
        (tensor([2., 2., 2.]), tensor([1., 1., 1.]))

    Args:
        width_in, width_out: D and E.
        device: device of the samples.
    """

    def __init__(self, width_in: int, width_out: int, device: torch.device | None = None) -> None:
        self._count = 0
        self._sums = [torch.zeros(width, dtype=torch.float64, device=device) for width in (width_in, width_out)]
        self._products = [torch.zeros(width_in, len(total)).to(total) for total in self._sums]

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Adds samples, of any number."""
        x = inputs.double()
        self._count += len(x)
        for total, product, part in zip(self._sums, self._products, (x, outputs.double()), strict=True):
            total += part.sum(0)
            product.addmm_(x.T, part)

    def solve(self) -> tuple[Tensor, Tensor]:
        """Weight `[D, E]` and bias `[E]` in float32."""
        means = [total / self._count for total in self._sums]
        moments, cross = (
            product - self._count * torch.outer(means[0], mean)
            for product, mean in zip(self._products, means, strict=True)
        )
        penalty = _RIDGE * moments.diagonal().mean() * torch.eye(len(moments)).to(moments)
        weight = torch.linalg.solve(moments + penalty, cross)
        return weight.float(), (means[1] - means[0] @ weight).float()
