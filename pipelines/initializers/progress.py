"""The progress bars of an initialization."""

from __future__ import annotations

import os

from mac_rag.progress import ProgressBar, progress_bar


def init_progress(label: str, total: int) -> ProgressBar:
    """A bar of one phase of `init: kv_regression`; of several processes, the first shows it."""
    return progress_bar(f"kv_regression: {label}", total, disable=os.environ.get("RANK", "0") != "0")
