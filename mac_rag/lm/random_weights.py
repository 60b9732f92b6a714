"""Models whose weights all come from elsewhere are made without random ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

_RANDOM = ("normal_", "uniform_", "kaiming_uniform_")


class NoRandomWeights(TorchFunctionMode):
    """New weights stay as memory happens to be. For models that get all weights from a file: most of their time is
    otherwise spent on random numbers that nobody uses."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", "") in _RANDOM:  # of torch.nn.init or of a tensor
            return kwargs["tensor"] if kwargs and "tensor" in kwargs else args[0]
        return function(*args, **(kwargs or {}))
