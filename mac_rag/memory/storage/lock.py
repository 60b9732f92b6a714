"""One writer at a time: a lock that the system releases when its process ends, and a note that names the holder."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from mac_rag.atomic_files import sync_folder, write_file
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
        self._path, self._holder = folder / LOCK, folder / HOLDER
        # Not bound to this thread: a bank may be opened in one thread and closed in another.
        self._lock = FileLock(self._path, mode=0o600, thread_local=False)
        self._process = os.getpid()
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
            self._file = _identity(self._path)
            write_file(self._holder, [json.dumps(note).encode()])
            sync_folder(folder)  # before any commit: `mac_rag.memory.storage.commit_reader` tells a crash by the note
        except BaseException:
            self._lock.release()
            raise

    def _describe_holder(self) -> str:
        try:
            note = read_json(self._holder, 1 << 16)
            return f"process {note['pid']} on {note['host']} since {note['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def check(self) -> None:
        """Makes sure that the lock still keeps others out.

        Raises:
            BankError: in a process that was forked after the lock was acquired; when the lock's file was removed or
                replaced, so that another process can hold a lock of the same name.
        """
        if os.getpid() != self._process:
            raise BankError(
                f"{self._path.parent} was opened for writing in process {self._process}, from which this process was "
                "forked; only that one may write to it; open the bank after the fork, in one process"
            )
        if _identity(self._path) != self._file:
            raise BankError(
                f"{self._path} was removed or replaced while this process held the lock, so another process may be "
                "writing; close the bank, open it again and repeat the change"
            )

    def release(self) -> None:
        """Releases the lock. A second call does nothing, nor does one in a process that was forked from the holder."""
        if os.getpid() == self._process and self._lock.is_locked:
            with suppress(OSError):
                if _identity(self._path) == self._file:  # otherwise the note is another's
                    self._holder.unlink(missing_ok=True)
            self._lock.release()


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from others that had its name, as long as it is open; None if there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
