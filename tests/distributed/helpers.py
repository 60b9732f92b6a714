"""What actors of tests share, in a module that they can import."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mac_rag.distributed.adapting import Amortizer


def once(marker: Path) -> bool:
    """True for the first who asks, in any process."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Dying(Amortizer):
    """Dies of the first window that any of these actors gets."""

    def amortize(self, rows: Any) -> Any:
        if once(Path(self._name).with_name("died")):
            os._exit(1)
        return super().amortize(rows)


class Failing(Amortizer):
    """Raises what no part of mac_rag raises on purpose."""

    def amortize(self, rows: Any) -> Any:
        raise RuntimeError("the disk is on fire")


class Doomed(Amortizer):
    """Dies of each window."""

    def amortize(self, rows: Any) -> Any:
        os._exit(1)
