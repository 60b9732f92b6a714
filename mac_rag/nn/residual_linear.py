"""A linear map that starts as the identity."""

from __future__ import annotations

from torch import Tensor, nn


class ResidualLinear(nn.Module):
    """`x + W x`, where W starts at zero: a map that starts as the identity.

    W is kept apart from the identity, beside whose ones its small weights would be lost when they are rounded.

    Args:
        width: width of x.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.added = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.added.weight)

    def forward(self, states: Tensor) -> Tensor:
        """`[..., width] -> [..., width]`."""
        added: Tensor = self.added(states)
        return states + added
