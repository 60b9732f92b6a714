"""The folder that keeps results and downloads for later runs."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "MAC_RAG_CACHE"


def cache_folder() -> Path:
    """The folder that all runs share: `$MAC_RAG_CACHE`, or `mac_rag` in the user's cache folder."""
    folder = os.environ.get(CACHE_VARIABLE)
    return Path(folder) if folder else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mac_rag"
