"""The progress bar of long work."""

from __future__ import annotations

import subprocess
import sys

KILLED_WHILE_IT_DRAWS = """
import os, signal
from mac_rag.progress import progress_bar

with progress_bar("work", 2) as bar:
    child = os.fork()
    if not child:
        bar._bar.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    bar.advance(2)
with progress_bar("more work", 1) as bar:
    bar.advance()
"""


def test_a_forked_process_that_is_killed_while_it_draws_stops_no_other() -> None:
    subprocess.run([sys.executable, "-c", KILLED_WHILE_IT_DRAWS], timeout=60, check=True, stderr=subprocess.DEVNULL)
