"""Where a bank lies: in a folder, or behind a URL of an object store that fsspec knows."""

from __future__ import annotations

import re
from pathlib import Path

from mac_rag.errors import BankError

# One letter in front of the colon is a drive of Windows.
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")


def is_url(place: str | Path) -> bool:
    """True for a URL; also for one that was made a path, which loses a slash."""
    return _URL.match(str(place)) is not None


def local_folder(place: str | Path) -> Path:
    """The folder of a bank that is to be written.

    Raises:
        BankError: for a URL.
    """
    if is_url(place):
        raise BankError(
            f"{place} can only be read; write to a bank in a folder, and put that there: mac-rag bank upload --bank "
            "FOLDER --to URL"
        )
    return Path(place)
