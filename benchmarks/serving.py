"""A server under load: throughput, latencies, errors and memory: `python -m benchmarks.serving --help`."""

from __future__ import annotations

import itertools
import random
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    import httpx

# Number of requests of each kind among 100 of the mixed load.
MIXED = {"ask": 70, "stream": 15, "put": 10, "delete": 5}
_PARTS = 8  # of the mixed load
_EVERY = 2.0  # seconds between two measurements of memory
_REST = 15.0  # seconds of rest after each part, at most as long as the part itself
_SETTLED = 5  # documents of each client, about, once puts and deletes balance


def main(
    model: Annotated[str, typer.Option(help="A MAC model: a name or a folder.")] = "mac-small",
    documents: Annotated[int, typer.Option(min=10, help="Documents of the bank.")] = 200,
    clients: Annotated[int, typer.Option(min=2, help="Clients at a time.")] = 32,
    seconds: Annotated[
        float, typer.Option(min=1, help="Seconds of each of the three measures of questions alone.")
    ] = 30,
    mixed: Annotated[float, typer.Option(min=1, help="Seconds of the mixed load.")] = 600,
    seed: Annotated[int, typer.Option(help="Random seed of the load.")] = 0,
) -> None:
    """Time questions to the engine and to a server on loopback; then mix questions, streams, puts and deletes.

    The mix comes in eight parts. After each, the server rests, and its memory at rest is measured.
    """
    from tempfile import TemporaryDirectory

    from mac_rag.data.newswire.generate import generate
    from mac_rag.engine import MACEngine
    from mac_rag.model import MACModel

    stream = generate("val", documents)
    asked = [question.question for question in stream.questions]
    numbers = itertools.count()

    def question() -> str:
        """A question unlike all others, so that no cache answers it. Thread-safe, as `next` is."""
        number = next(numbers)
        return f"{asked[number % len(asked)]} {number}"

    with TemporaryDirectory() as folder, Served(Path(folder), model) as server:
        load = Load(server, question)
        load.prepare([(document.id, document.text) for document in stream.documents])
        engine = MACEngine(MACModel.from_pretrained(model))
        engine.adapt(stream.documents)

        def ask_engine(_client: int, _chance: random.Random) -> str:
            engine.answer([question()])
            return "ask"

        measures: list[tuple[str, int, Callable[[int, random.Random], str]]] = [
            ("engine", clients, ask_engine),
            ("one client", 1, load.ask),
            (f"{clients} clients", clients, load.ask),
        ]
        for name, count, ask in measures:
            say(f"{name:>12}: {described(run_load(ask, count, seconds, seed), seconds)}")
        latencies: dict[str, list[float]] = defaultdict(list)
        with Memory(server) as memory:
            for part in range(_PARTS):
                for kind, times in run_load(load.any, clients, mixed / _PARTS, seed + part).items():
                    latencies[kind] += times
                time.sleep(min(_REST, mixed / _PARTS))
                memory.rests()
        say(f"{'mixed':>12}: {described(latencies, mixed)}")
        say(f"{'memory':>12}: {memory.described()}")


class Served:
    """A server in a process of its own, on a free port of the loopback address; ends with the `with` block."""

    def __init__(self, folder: Path, model: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        code = "from mac_rag.cli.main import main; main()"
        options = ["--data", str(folder), "--model", model, "--model-name", "served", "--port", str(port)]
        command = [sys.executable, "-c", code, "serve", *options, "--requests-per-minute", "0"]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def __enter__(self) -> Served:
        self.wait_until_ready()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(120)

    def wait_until_ready(self) -> None:
        """Waits until it takes requests."""
        import httpx

        while True:
            try:
                httpx.get(f"{self.url}/ready", trust_env=False).raise_for_status()
                return
            except httpx.HTTPError:
                if self._process.poll() is not None:
                    raise typer.BadParameter("the server has ended; start mac-rag serve by hand to see why") from None
                time.sleep(0.2)

    def resident(self) -> int:
        """MiB of main memory that it holds."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) // 1024


class Memory:
    """Main memory of a server, measured every few seconds during the `with` block, and when it rests."""

    def __init__(self, server: Served) -> None:
        self._server = server
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
            if self._end.wait(_EVERY):
                return

    def rests(self) -> None:
        """Records the memory at rest. Call it when the server has nothing to do."""
        self._resting.append(self._server.resident())

    def described(self) -> str:
        """MiB at the beginning, the most, and each time that it rested."""
        resting = ", ".join(f"{size:,}" for size in self._resting)
        return f"{self._seen[0]:,} MiB at the beginning, {max(self._seen):,} at most; at rest {resting}"


def described(latencies: Mapping[str, list[float]], seconds: float) -> str:
    """Requests a second, and p50, p95 and p99 of each kind in milliseconds."""
    total = sum(map(len, latencies.values()))
    kinds = [
        f"{kind} {len(times):,} ({', '.join(f'{1000 * quantile(times, q):.0f}' for q in (0.5, 0.95, 0.99))} ms)"
        for kind, times in sorted(latencies.items())
    ]
    return f"{total / seconds:.1f} a second; {'; '.join(kinds)}"


def quantile(times: list[float], q: float) -> float:
    """The value below which a share `q` of the times lies."""
    return sorted(times)[min(len(times) - 1, int(q * len(times)))]


class Load:
    """Requests to a server. Each returns its kind: `busy` for a 429, `error` with the status for any other fault."""

    def __init__(self, server: Served, question: Callable[[], str]) -> None:
        import httpx

        self._server, self._question = server, question
        self._limits = httpx.Limits(max_connections=1)
        self._own = threading.local()
        self._held: dict[int, list[str]] = defaultdict(list)  # documents of each client, in whatever thread

    @property
    def _http(self) -> httpx.Client:
        """A connection for each thread."""
        import httpx

        if not hasattr(self._own, "http"):
            self._own.http = httpx.Client(base_url=self._server.url, timeout=120, trust_env=False, limits=self._limits)
        http: httpx.Client = self._own.http
        return http

    def prepare(self, documents: list[tuple[str, str]]) -> None:
        """Makes the bank."""
        self._http.post("/v1/banks", json={"name": "load", "retriever": "none"}).raise_for_status()
        for first in range(0, len(documents), 100):
            some = [{"id": name, "text": text} for name, text in documents[first : first + 100]]
            self._http.post("/v1/banks/load/documents", json={"documents": some}).raise_for_status()

    def ask(self, client: int, chance: random.Random, *, stream: bool = False) -> str:
        """Asks a question."""
        message = {"role": "user", "content": self._question()}
        body = {"model": "served:load", "messages": [message], "sources": 0, "stream": stream}
        response = self._http.post("/v1/chat/completions", json=body)
        if stream and response.status_code == 200 and not response.text.endswith("data: [DONE]\n\n"):
            return "error cut"
        return outcome(response.status_code, "stream" if stream else "ask")

    def any(self, client: int, chance: random.Random) -> str:
        """A request of the mixed load."""
        [kind] = chance.choices(list(MIXED), list(MIXED.values()))
        http, held = self._http, self._held[client]
        if kind in ("ask", "stream"):
            return self.ask(client, chance, stream=kind == "stream")
        if held and (kind == "delete" or len(held) > _SETTLED):
            response = http.delete("/v1/banks/load/document", params={"id": held.pop()})
            return outcome(response.status_code, "delete")
        name = f"client-{client}-{chance.random()}"
        body = {"documents": [{"id": name, "text": f"Report {name}: the board of Rainga Press met in May."}]}
        response = http.post("/v1/banks/load/documents", json=body)
        if response.status_code == 200:
            held.append(name)
        return outcome(response.status_code, "put")


def outcome(status: int, kind: str) -> str:
    """The kind under which a response counts."""
    return kind if status == 200 else "busy" if status == 429 else f"error {status}"


def run_load(
    request: Callable[[int, random.Random], str], clients: int, seconds: float, seed: int
) -> dict[str, list[float]]:
    """Makes requests for some seconds from some threads, one at a time each; returns latencies by kind of request."""
    latencies: dict[str, list[float]] = defaultdict(list)
    end = time.perf_counter() + seconds

    def client(number: int) -> None:
        chance = random.Random(seed * 1000 + number)
        while (began := time.perf_counter()) < end:
            kind = request(number, chance)
            latencies[kind].append(time.perf_counter() - began)
            if kind == "busy":
                time.sleep(0.2)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return latencies


if __name__ == "__main__":
    run_command(main)
