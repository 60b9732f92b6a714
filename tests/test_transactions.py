"""A change that fails leaves bank and retriever as they were, in memory and on disk, and the same call then succeeds.

A sample: `make torture` lets every call of the file system fail in every way (`tests/torture/faults.py`).
"""

from __future__ import annotations

import subprocess
import sys

from tests.torture.system import preloading


def test_a_change_that_fails_at_a_call() -> None:
    """In a process whose calls of the system can be watched, those of SQLite, too."""
    command = [sys.executable, "-m", "tests.torture", "faults", "--seed", *map(str, range(0, 8000, 61))]
    done = subprocess.run(command, env=preloading(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
