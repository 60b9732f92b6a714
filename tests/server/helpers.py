"""A server on a free loopback port, in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from mac_rag.model import MACModel
from mac_rag.server.app import Server
from mac_rag.server.service import Limits, Service

LIMITS = Limits(requests_per_minute=0)


class Running:
    """A server that answers, and its service."""

    def __init__(self, server: Server, service: Service, url: str) -> None:
        self.server = server
        self.service = service
        self.url = url

    def client(self, token: str | None = None, **options: Any) -> httpx.Client:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, trust_env=False, **options)


@contextmanager
def serving(folder: Path, model: MACModel, *, anyone: bool = True, **limits: Any) -> Iterator[Running]:
    service = Service(folder, model, "tiny", replace(LIMITS, **limits))
    server = Server(service, host="127.0.0.1", port=0, anyone=anyone)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    started = threading.Event()
    while not server.started:
        assert thread.is_alive()
        started.wait(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Running(server, service, f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
