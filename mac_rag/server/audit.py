"""The audit log: who changed what, and when. It names banks and documents, and quotes no text."""

from __future__ import annotations

import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mac_rag.atomic_files import private

_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


class AuditLog:
    """Appends one line of JSON for each change, after it is on the disk.

    Args:
        path: the file; it is made with the mode 0600, and followed if it is moved away.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def note(self, who: str, action: str, bank: str, **details: Any) -> None:
        """Notes a change.

        Args:
            who: name of the key.
            action: what was done, as `bank.create`.
            bank: name of the bank.
            details: numbers, and ids of documents.
        """
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"time": moment, "key": who, "action": action, "bank": bank, **details}
        line = json.dumps(record).encode() + b"\n"
        with self._lock, open(self._path, "ab", opener=lambda path, flags: private(path, flags | _NO_FOLLOW)) as file:
            file.write(line)
