"""A limit on what a described network may allocate, for descriptions that nobody vouches for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from mac_rag.errors import ModelLoadError


class AllocationLimit(TorchDispatchMode):
    """A context in which new tensors may have so many numbers together; the next is refused before it is allocated.

    Args:
        numbers: the limit.
        where: the file whose description is followed, for the message.
    """

    def __init__(self, numbers: int, where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit = self._left = numbers
        self._where = where

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        size = args[0] if args else None
        # Only what makes tensors from nothing has a size for its first argument.
        if isinstance(size, list | tuple) and all(isinstance(length, int) for length in size):
            self._left -= math.prod(size)
        elif operation.overloadpacket.__name__ == "arange":
            self._left -= int(max(abs(bound) for bound in args if isinstance(bound, int | float)))
        if self._left < 0:
            raise ModelLoadError(
                f"{self._where} describes networks of more than {self._limit:,} numbers, which its weights cannot fill"
            )
        return operation(*args, **(kwargs or {}))
