"""A server in a process of its own, and the main memory that it holds."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import typer


class Served:
    """A server in a process of its own, on a free port of the loopback address; ended at the end of the `with` block.

    Args:
        folder: its folder.
        model: its model.
    """

    def __init__(self, folder: Path, model: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        code = "from mac_rag.cli.main import main; main()"
        options = ["--data", str(folder), "--model", model, "--model-name", "served", "--port", str(port)]
        self._command = [sys.executable, "-c", code, "serve", *options, "--requests-per-minute", "0"]
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stderr=subprocess.DEVNULL)

    def __enter__(self) -> Served:
        self.wait_until_ready()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(120)

    def wait_until_ready(self) -> None:
        """Waits until it takes requests.

        Raises:
            BadParameter: when its process has ended by itself.
        """
        import httpx

        while True:
            process = self._process
            try:
                httpx.get(f"{self.url}/ready", trust_env=False).raise_for_status()
                return
            except httpx.HTTPError:
                if process is self._process and process.poll() not in (None, -signal.SIGKILL):
                    raise typer.BadParameter("the server has ended; start mac-rag serve by hand to see why") from None
                time.sleep(0.2)

    def kill_and_start(self) -> None:
        """Ends its process at once, as the loss of power does for a process, and starts another one on its folder."""
        self._process.kill()
        self._process.wait()
        self._process = self._started()

    def resident(self) -> int:
        """MiB of main memory that it holds."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) // 1024


class Memory:
    """Main memory of a server, looked at every few seconds during the `with` block, and when it rests.

    Args:
        server: the server.
        every: seconds between two looks.
    """

    def __init__(self, server: Served, every: float = 2.0) -> None:
        self._server, self._every = server, every
        self._seen: list[int] = []
        self._resting: list[int] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while True:
            self._seen.append(self._server.resident())
            if self._end.wait(self._every):
                return

    def rests(self) -> None:
        """Called when the server has nothing to do: keeps what it holds then."""
        self._resting.append(self._server.resident())

    def described(self) -> str:
        """MiB at the beginning, the most, and each time that it rested."""
        resting = ", ".join(f"{size:,}" for size in self._resting)
        return f"{self._seen[0]:,} MiB at the beginning, {max(self._seen):,} at most; at rest {resting}"
