"""A bank on a web server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mac_rag.errors import BankError, DamageError
from mac_rag.memory import MemoryBank
from tests.memory.storage.remote.helpers import fill, is_right


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder; under /ranges/ with ranges."""

    folder = Path()

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        path = self.folder / self.path.removeprefix("/ranges").lstrip("/")
        if not path.is_file():
            self.send_error(503 if self.path.startswith("/busy") else 404)
            return
        content, wanted = path.read_bytes(), self.headers.get("Range")
        if wanted and self.path.startswith("/ranges"):
            first, last = wanted.removeprefix("bytes=").split("-")
            content = content[int(first) : int(last) + 1]
            self.send_response(206)
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Address of a web server that serves a folder with the bank `bank` of eight documents."""
    fill(tmp_path / "bank", 8)
    Handler.folder = tmp_path
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_folder_that_a_web_server_serves_is_a_bank(server: str, cache: Path) -> None:
    assert is_right(MemoryBank.open(f"{server}/ranges/bank"), [7, 0, 3])
    with pytest.raises(BankError, match=f"there is no memory bank at {server}/nothing"):
        MemoryBank.open(f"{server}/nothing")


def test_errors_of_a_web_server_say_what_to_do(server: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(BankError, match=r"manifest.json cannot be read.*503.*try again"):
        MemoryBank.open(f"{server}/busy/bank")
    bank = MemoryBank.open(f"{server}/bank")
    with pytest.raises(DamageError, match="the store serves no ranges"):
        bank.read(0, 1)
