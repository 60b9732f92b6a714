"""The folder where results and downloads are kept for later runs."""

from __future__ import annotations

import os
from pathlib import Path

from mac_rag.errors import ConfigError

CACHE_VARIABLE = "MAC_RAG_CACHE"
LIMIT_VARIABLE = "MAC_RAG_CACHE_GIB"
_DEFAULT_GIB = 16.0


def cache_folder() -> Path:
    """The folder that all runs share: `$MAC_RAG_CACHE`, or `mac_rag` in the user's cache folder."""
    folder = os.environ.get(CACHE_VARIABLE)
    return Path(folder) if folder else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mac_rag"


def cache_limit() -> int:
    """Bytes of banks behind URLs that are kept: `$MAC_RAG_CACHE_GIB`, or 16 GiB.

    Raises:
        ConfigError: for a variable that is no positive number.
    """
    text = os.environ.get(LIMIT_VARIABLE) or str(_DEFAULT_GIB)
    try:
        size = int(float(text) * 2**30)
    except (ValueError, OverflowError):  # OverflowError for infinity
        size = 0
    if size < 1:
        raise ConfigError(f"{LIMIT_VARIABLE} is {text[:40]!r}; give the GiB of the cache as a number above 0")
    return size
