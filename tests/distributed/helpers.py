"""Actors that misbehave, in a module that workers can import."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from mac_rag.distributed.workers import Amortizer


def once(marker: Path) -> bool:
    """True for the first who asks, in any process."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Counting(Amortizer):
    """Leaves a file beside the staging folder for each group that it amortizes."""

    def __call__(self, batch: Any) -> Any:
        (self._staging.parent / f"amortized-{os.getpid()}-{time.monotonic_ns()}").touch()
        return super().__call__(batch)


class Dying(Amortizer):
    """Dies, once in all processes, in the middle of a group."""

    def __call__(self, batch: Any) -> Any:
        if once(self._staging.parent / "died"):
            os._exit(1)
        return super().__call__(batch)


class Stalling(Amortizer):
    """Amortizes one group in all processes, and then nothing more."""

    def __call__(self, batch: Any) -> Any:
        if not once(self._staging.parent / "amortized-first"):
            time.sleep(600)
        return super().__call__(batch)


class Doomed(Amortizer):
    """Dies of its model."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.__dict__["_writer"] = _Deadly()


class _Deadly:
    def __getattr__(self, name: str) -> Any:
        os._exit(1)


class Failing(Amortizer):
    """Raises what no part of mac_rag raises on purpose."""

    def _amortize(self, group: Any) -> str:
        raise RuntimeError("the disk is on fire")
