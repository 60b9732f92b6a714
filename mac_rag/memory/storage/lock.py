"""One writer at a time: a lock that the system releases when its process ends, and a note that names the holder."""

from __future__ import annotations

import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from mac_rag.atomic_files import write_file
from mac_rag.errors import BankError
from mac_rag.untrusted_files import read_json

LOCK = "writer.lock"
HOLDER = "writer.json"


class WriterLock:
    """The right to write to a bank. Creating the object acquires it.

    Args:
        folder: folder of the bank.

    Raises:
        BankError: when another process holds the lock; names the process and its host.
    """

    def __init__(self, folder: Path) -> None:
        self._holder = folder / HOLDER
        # Not bound to this thread: a bank may be opened in one thread and closed in another.
        self._lock = FileLock(folder / LOCK, thread_local=False)
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise BankError(
                f"{folder} is open for writing in {self._describe_holder()}; wait until it is done, or close the bank "
                "there"
            ) from None
        since = datetime.now(UTC).isoformat(timespec="seconds")
        note = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        try:
            write_file(self._holder, [json.dumps(note).encode()])
        except BaseException:
            self._lock.release()
            raise

    def _describe_holder(self) -> str:
        try:
            note = read_json(self._holder, 1 << 16)
            return f"process {note['pid']} on {note['host']} since {note['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def release(self) -> None:
        """Releases the lock. A second call does nothing."""
        if self._lock.is_locked:
            self._holder.unlink(missing_ok=True)
            self._lock.release()
