"""How a command comes to its work soon."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OBJECTS = 1_000_000  # about as many as PyTorch, transformers and a model make until the first question
_usual: tuple[int, int, int] | None = None  # the thresholds outside of `rare_garbage_collection`


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Lets Python look for garbage rarely, until `settle`.

    Nearly all objects that imports and models make stay. Python looks through them again and again as they become more,
    which takes a quarter of the time to the first answer.
    """
    global _usual
    _usual = gc.get_threshold()
    gc.set_threshold(_OBJECTS, *_usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*_usual)
        _usual = None


def settle() -> None:
    """Ends the start: the objects that are there stay and are not looked through again, and new ones are as always."""
    if _usual is not None:
        gc.freeze()
        gc.set_threshold(*_usual)
