"""The mean of the weights over the last steps of a training run.

One run's mean is as good as the end of a longer one: the weights of single steps lie around it (Izmailov et al., 2018,
"Averaging Weights Leads to Wider Optima and Better Generalization").
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MEAN = "mean/"  # prefix of a weight's name in a checkpoint, for its mean


class WeightMean:
    """The running mean of a module's trained weights, after the share `start` of so many steps."""

    def __init__(self, module: nn.Module, steps: int, start: float) -> None:
        self._module = module
        self._first = min(round(start * steps), steps - 1) + 1  # number of steps after which the weights first count
        self._mean: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Counts the weights after so many steps."""
        count = step - self._first + 1
        if count < 1:
            return
        for name, weight in self._weights().items():
            if count == 1:
                self._mean[name] = weight.float().clone()
            else:
                self._mean[name].lerp_(weight.float(), 1 / count)

    @torch.no_grad()
    def put(self) -> None:
        """Replaces the weights by the mean."""
        for name, weight in self._weights().items():
            weight.copy_(self._mean[name])

    def state(self, step: int) -> dict[str, Tensor]:
        """Tensors that a checkpoint after so many steps holds beside the weights, of the right shape."""
        if step < self._first:
            return {}
        like = self._mean or {name: weight.float() for name, weight in self._weights().items()}
        return {_MEAN + name: mean for name, mean in like.items()}

    def load(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Takes the means out of a checkpoint's tensors, and returns the other tensors."""
        self._mean = {name.removeprefix(_MEAN): t for name, t in state.items() if name.startswith(_MEAN)}
        return {name: t for name, t in state.items() if not name.startswith(_MEAN)}

    def _weights(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self._module.named_parameters() if weight.requires_grad}
