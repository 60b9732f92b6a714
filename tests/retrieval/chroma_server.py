"""A real Chroma server on loopback, for tests."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self
from urllib.request import urlopen


class Server:
    """`chroma run` on a free port, until the context ends."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        command = Path(sys.executable).with_name("chroma")
        self._command = [command, "run", "--path", folder, "--host", "127.0.0.1", "--port", str(self.port)]
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                urlopen(f"{self.url}/api/v2/heartbeat").close()
                return
            except OSError:
                assert self.process.poll() is None, "chroma run ended"
                time.sleep(0.05)
        raise AssertionError("chroma run does not answer")

    def client(self) -> Any:
        """A client of Chroma's own."""
        import chromadb
        from chromadb.config import Settings

        return chromadb.HttpClient("127.0.0.1", self.port, settings=Settings(anonymized_telemetry=False))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
