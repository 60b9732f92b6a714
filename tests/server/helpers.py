"""A server on a free loopback port, in a thread, and what tests ask of it again and again."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from mac_rag.model import MACModel
from mac_rag.server.app import Access, Server
from mac_rag.server.keys import KeyStore
from mac_rag.server.service import Limits, Service
from tests.helpers import wait_until

LIMITS = Limits(requests_per_minute=0)


class Running:
    """A server that answers, its service, and its keys by their names."""

    def __init__(self, server: Server, service: Service, url: str, tokens: Mapping[str, str]) -> None:
        self.server = server
        self.service = service
        self.url = url
        self.tokens = tokens

    def client(self, token: str | None = None, **options: Any) -> httpx.Client:
        """A client with a key, or with the one of this name."""
        headers = {} if token is None else {"Authorization": f"Bearer {self.tokens.get(token, token)}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, trust_env=False, **options)

    def connected(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=10)


@contextmanager
def serving(
    folder: Path, model: MACModel, *, keys: Mapping[str, tuple[Any, Sequence[str]]] | None = None, **limits: Any
) -> Iterator[Running]:
    """Serves a folder; `keys`: name -> scope and banks; None to let everybody do everything."""
    store = KeyStore(folder / "keys.json")
    tokens = {name: store.add(name, scope, banks) for name, (scope, banks) in (keys or {}).items()}
    service = Service(folder, model, "tiny", replace(LIMITS, **limits))
    server = Server(service, host="127.0.0.1", port=0, access=Access(anyone=keys is None))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    started = threading.Event()
    while not server.started:
        assert thread.is_alive()
        started.wait(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Running(server, service, f"http://127.0.0.1:{port}", tokens)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def make(client: httpx.Client, name: str, *documents: tuple[str, str] | Mapping[str, Any], **more: Any) -> str:
    """Makes a bank with documents, given as JSON or as ids and texts; returns its path."""
    client.post("/v1/banks", json={"name": name, **more}).raise_for_status()
    if documents:
        rows = [{"id": one[0], "text": one[1]} if isinstance(one, tuple) else one for one in documents]
        client.post(f"/v1/banks/{name}/documents", json={"documents": rows}).raise_for_status()
    return f"/v1/banks/{name}"


def ended(client: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    """A job when it has ended."""

    def look() -> bool:
        job.update(client.get(f"/v1/jobs/{job['id']}").json())
        return job["state"] not in ("waiting", "running")

    wait_until(look)
    return job


def events(response: httpx.Response) -> list[Any]:
    """The objects of a stream."""
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
