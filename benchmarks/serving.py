"""A server under load: throughput, latencies, errors, memory and files: `python -m benchmarks.serving --help`."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    import httpx

# Number of requests of each kind among 100 of the mixed load.
MIXED = {"ask": 54, "stream": 14, "put": 11, "delete": 6, "upload": 6, "job": 5, "cancel": 4}
KEYS = ("amber", "birch", "cedar")  # each has a bank of its own name, which the others do not see
_PARTS = 8  # of the mixed load
_EVERY = 2.0  # seconds between two measurements of memory
_PAUSE = 20.0  # most seconds between two kills of worker processes, at most as long as a part
_CRASHED = "its reader has crashed"  # what a job says of a file whose conversion was killed twice
_REST = 15.0  # seconds of rest after each part, at most as long as the part itself
_NAMES = 6  # documents of each kind that a client puts, again and again
_OPEN = ("waiting", "running")
_FLAT = 1.05  # most growth after the warm-up
_FILES_SLACK = 1 << 16  # bytes: a few pages of a database
_WARM_UP = 60.0  # seconds of a part after which memory and files may grow no more; a shorter run does not judge them


def main(
    model: Annotated[str, typer.Option(help="A MAC model: a name or a folder.")] = "mac-small",
    documents: Annotated[int, typer.Option(min=10, help="Documents of each key's bank.")] = 200,
    clients: Annotated[int, typer.Option(min=2, help="Clients at a time.")] = 32,
    seconds: Annotated[
        float, typer.Option(min=1, help="Seconds of each of the three measures of questions alone.")
    ] = 30,
    mixed: Annotated[float, typer.Option(min=1, help="Seconds of the mixed load.")] = 600,
    seed: Annotated[int, typer.Option(help="Random seed of the load.")] = 0,
) -> None:
    """Time questions to the engine and to a server on loopback; then mix everything that clients with three keys do.

    The mix comes in eight parts: questions, streams, changes, uploads and jobs, some of them cancelled, while processes
    that convert files are killed. Amid the first part, the server itself is killed and starts again; so it is after the
    last one. After each part the server rests, every acknowledged change is looked for, and banks are compacted. From
    the third part on, memory, and files for as many documents, must be those after the second, within 5 %. An error
    that is not the client's, a lost change, or growth ends the run with exit code 1.
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
        files: list[dict[str, int]] = []
        held: list[int] = []
        memory = Memory(server)
        with meanwhile(memory.watch):
            for part in range(_PARTS):
                pause, whole = min(_PAUSE, mixed / _PARTS), mixed / _PARTS / 2 if part == 0 else None
                with meanwhile(killing(server, pause, whole=whole, seed=seed + part)):
                    for kind, times in run_load(load.any, clients, mixed / _PARTS, seed + part).items():
                        latencies[kind] += times
                load.check()
                load.compact()
                time.sleep(min(_REST, mixed / _PARTS))
                memory.rests()
                files.append(sizes(Path(folder)))
                held.append(load.documents)
        server.kill()
        load.check()
        say(f"{'mixed':>12}: {described(latencies, mixed)}")
        say(f"{'memory':>12}: {memory.described()}")
        say(f"{'files':>12}: " + "; ".join(f"{name} {_all_of(files, name)}" for name in files[0]))
        say(f"{'documents':>12}: {', '.join(map(str, held))}")
        killed = f"{server.deaths} times the server, {server.killed_workers} workers"
        say(f"{'killed':>12}: {killed}; found {load.found:,} documents as acknowledged")
        faults = [
            *load.faults,
            *(memory.faults() + grown(files, held[-1] / held[1]) if mixed / _PARTS >= _WARM_UP else []),
        ]
        if 2 * len(latencies["crashed"]) > server.killed_workers:
            faults.append(f"more files were left out than {server.killed_workers} kills of workers tell")
        faults += [f"{len(times):,} times {kind}" for kind, times in latencies.items() if kind.startswith("error")]
    if faults:
        for fault, count in Counter(faults).most_common(20):
            say(f"{count} x {fault}", err=True)
        raise SystemExit(1)


class Served:
    """A server in a process of its own, on a free port of the loopback address; ends with the `with` block.

    Attributes:
        tokens: the keys, each for the bank of its name.
        deaths: how often the server was killed.
        killed_workers: how many of its processes were killed.
        alive: set as long as it was not killed.
    """

    def __init__(self, folder: Path, model: str) -> None:
        from mac_rag.server.keys import KeyStore
        from mac_rag.server.service import KEYS as KEY_FILE

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        store = KeyStore(folder / KEY_FILE)
        self.tokens = {name: store.add(name, "admin", [name]) for name in KEYS}
        self.url = f"http://127.0.0.1:{port}"
        self.deaths = self.killed_workers = 0
        self.alive = threading.Event()
        code = "from mac_rag.cli.main import main; main()"
        options = ["--data", str(folder), "--model", model, "--model-name", "served", "--port", str(port)]
        self._command = [sys.executable, "-c", code, "serve", *options, "--requests-per-minute", "0"]
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)

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
                self.alive.set()
                return
            except httpx.HTTPError:
                if self._process.poll() is not None:
                    raise typer.BadParameter("the server has ended; start mac-rag serve by hand to see why") from None
                time.sleep(0.2)

    def kill(self) -> None:
        """Kills it with SIGKILL, and starts it again."""
        self.alive.clear()
        self.deaths += 1
        self._process.kill()
        self._process.wait()
        self._start()
        self.wait_until_ready()

    def kill_workers(self) -> None:
        """Kills all processes that it has started."""
        for task in Path(f"/proc/{self._process.pid}/task").glob("*/children"):
            with suppress(FileNotFoundError, ProcessLookupError):
                for child in task.read_text().split():
                    os.kill(int(child), signal.SIGKILL)
                    self.killed_workers += 1

    def resident(self) -> int:
        """MiB of main memory that it holds."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) // 1024


@contextmanager
def meanwhile(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Runs a function in a thread during the `with` block; at its end, the event that the function gets is set."""
    end = threading.Event()
    thread = threading.Thread(target=work, args=(end,))
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def killing(server: Served, pause: float, *, whole: float | None, seed: int) -> Callable[[threading.Event], None]:
    """Kills worker processes of a server now and then, until the event.

    Args:
        server: the server.
        pause: most seconds between two kills.
        whole: seconds after which the server itself is killed, too; None not to.
        seed: random seed of the times.
    """
    chance = random.Random(seed)

    def kill(end: threading.Event) -> None:
        if whole is not None:
            end.wait(whole)
            server.kill()
        while not end.wait(chance.uniform(0, pause)):
            server.kill_workers()

    return kill


class Memory:
    """Main memory of a server, measured every few seconds, and when it rests."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self._seen: list[int] = []
        self._resting: list[int] = []

    def watch(self, end: threading.Event) -> None:
        """Measures until the event."""
        while True:
            with suppress(OSError, IndexError):  # it was killed
                self._seen.append(self._server.resident())
            if end.wait(_EVERY):
                return

    def rests(self) -> None:
        """Records the memory at rest. Call it when the server has nothing to do."""
        self._resting.append(self._server.resident())

    def described(self) -> str:
        """MiB at the beginning, the most, and each time that it rested."""
        resting = ", ".join(f"{size:,}" for size in self._resting)
        return f"{self._seen[0]:,} MiB at the beginning, {max(self._seen):,} at most; at rest {resting}"

    def faults(self) -> list[str]:
        """Growth from the second rest to the last."""
        first, last = self._resting[1], self._resting[-1]
        return [f"memory at rest grew from {first:,} to {last:,} MiB"] if last > _FLAT * first else []


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of a server's files by their kinds. The audit log is left out: it has a line for each change."""
    kinds = {
        "banks": folder.glob("banks/*/bank"),
        "their logs": folder.glob("banks/*/bank-*"),
        "jobs": folder.glob("jobs.sqlite*"),
        "uploads": folder.glob("uploads/*/*"),
    }
    return {kind: sum(file.stat().st_size for file in found) for kind, found in kinds.items()}


def _all_of(files: Sequence[Mapping[str, int]], name: str) -> str:
    return ", ".join(f"{one[name] / 1024:,.0f}" for one in files) + " KiB"


def grown(files: Sequence[Mapping[str, int]], documents: float) -> list[str]:
    """Files that have grown from the second rest to the last; banks may by their number of documents, a factor."""
    first, last = files[1], files[-1]
    return [
        f"{name} grew from {first[name]:,} to {last[name]:,} bytes"
        for name in first
        if last[name] > _FLAT * first[name] * (documents if name == "banks" else 1) + _FILES_SLACK
    ]


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


class KilledError(Exception):
    """The server was killed before it responded, so whether it did what was asked is unknown."""


class Load:
    """Requests to a server. Each returns its kind: `busy` for a 429, `killed`, `crashed`, `error` with what is wrong.

    A client changes only its own documents, one request at a time, so it knows the version of each that must be there.

    Attributes:
        faults: what was lost, or is there and should not be.
        found: number of documents that were found as they had been acknowledged.
    """

    def __init__(self, server: Served, question: Callable[[], str]) -> None:
        import httpx

        self._server, self._question = server, question
        self._limits = httpx.Limits(max_connections=1)
        self._own = threading.local()
        self._versions = itertools.count(1)
        self._held: dict[str, dict[str, int]] = {key: {} for key in KEYS}  # key -> document -> version; 0 at first
        self.faults: list[str] = []
        self.found = 0

    @property
    def documents(self) -> int:
        """Number of documents that must be there."""
        return sum(map(len, self._held.values()))

    @property
    def _http(self) -> httpx.Client:
        """A connection for each thread."""
        import httpx

        if not hasattr(self._own, "http"):
            self._own.http = httpx.Client(base_url=self._server.url, timeout=120, trust_env=False, limits=self._limits)
        http: httpx.Client = self._own.http
        return http

    def _send(self, key: str, method: str, path: str, **more: Any) -> httpx.Response:
        """A response to a request with a key, once the server has started again if it was killed before.

        Raises:
            KilledError: if the server is killed meanwhile; nothing that only reads does, and the request is repeated.
        """
        import httpx

        while True:
            deaths = self._server.deaths
            self._server.alive.wait()
            try:
                headers = {"Authorization": f"Bearer {self._server.tokens[key]}"}
                return self._http.request(method, path, headers=headers, **more)
            except httpx.TransportError:
                if self._server.deaths == deaths:
                    raise
                if method == "POST":
                    raise KilledError from None

    def prepare(self, documents: list[tuple[str, str]]) -> None:
        """Makes the banks."""
        for key in KEYS:
            self._send(key, "POST", "/v1/banks", json={"name": key}).raise_for_status()
            for first in range(0, len(documents), 100):
                some = [{"id": name, "text": text} for name, text in documents[first : first + 100]]
                response = self._send(key, "POST", f"/v1/banks/{key}/documents", json={"documents": some})
                response.raise_for_status()
            self._held[key] = {name: 0 for name, _ in documents}

    def ask(self, client: int, chance: random.Random, *, stream: bool = False) -> str:
        """Asks a question."""
        key = KEYS[client % len(KEYS)]
        message = {"role": "user", "content": self._question()}
        body = {"model": f"served:{key}", "messages": [message], "sources": 0, "stream": stream}
        response = self._send(key, "POST", "/v1/chat/completions", json=body)
        if stream and response.status_code == 200:
            if not response.text.endswith("data: [DONE]\n\n"):
                return "error cut"
            if '"error": {' in response.text:
                return "error in a stream"
        return outcome(response.status_code, "stream" if stream else "ask")

    def any(self, client: int, chance: random.Random) -> str:
        """A request of the mixed load, and what follows from it."""
        [kind] = chance.choices(list(MIXED), list(MIXED.values()))
        key, version = KEYS[client % len(KEYS)], next(self._versions)
        own = [name for name in list(self._held[key]) if name.startswith(f"{client}-")]
        new = [f"{client}-{number}" for number in chance.sample(range(_NAMES), 2)]
        names: list[str] = new
        place = f"/v1/banks/{key}"
        try:
            if kind in ("ask", "stream"):
                return self.ask(client, chance, stream=kind == "stream")
            if kind == "delete":
                names, version = chance.sample(own, min(2, len(own))) or new, 0
                response = self._send(key, "POST", f"{place}/documents/delete", json={"ids": names})
            elif kind == "upload" or (kind == "cancel" and chance.random() < 0.5):
                names = [f"{new[0]}.txt", f"{new[0]}.html", new[1]]
                texts = [_text(name, version) for name in names]
                contents = [texts[0], f"<html><body><p>{texts[1]}</p></body></html>", _row(names[2], texts[2])]
                files = [("file", (name, text)) for name, text in zip([*names[:2], "rows.jsonl"], contents)]
                response = self._send(key, "POST", f"{place}/files", files=files)
            else:
                rows = [{"id": name, "text": _text(name, version)} for name in names]
                body = {"documents": rows, "wait": kind == "put"}
                response = self._send(key, "POST", f"{place}/documents", json=body)
            if response.status_code == 202:
                job = response.json()["id"]
                if kind == "cancel":
                    time.sleep(0.2 * chance.random())
                    self._send(key, "DELETE", f"/v1/jobs/{job}").raise_for_status()
                    self._ended(key, job)
                    self._look(key, names, version)
                    return kind
                done = self._ended(key, job)
                if done["left_out"] and all(_CRASHED in one["reason"] for one in done["left_out"]):
                    self._look(key, names, version)
                    return "crashed"
                if done["state"] != "done" or done["left_out"]:
                    self.faults.append(f"a job ended as {done['state']}: {done['error']} {done['left_out']}"[:300])
                    self._look(key, names, version)
                    return "error job"
            elif response.status_code != 200:
                return outcome(response.status_code, kind)
        except KilledError:
            for one in self._send(key, "GET", "/v1/jobs").json()["data"]:
                if one["state"] in _OPEN:
                    self._ended(key, one["id"])
            if kind not in ("ask", "stream"):
                self._look(key, names, version or None, whole=kind == "put")
            return "killed"
        for name in names:
            if kind == "delete":
                self._held[key].pop(name, None)
            else:
                self._held[key][name] = version
        return kind

    def _ended(self, key: str, job: str) -> dict[str, Any]:
        """A job once it has ended, whatever happens to the server meanwhile."""
        while True:
            state: dict[str, Any] = self._send(key, "GET", f"/v1/jobs/{job}").raise_for_status().json()
            if state["state"] not in _OPEN:
                return state
            time.sleep(0.1)

    def _look(self, key: str, names: Sequence[str], version: int | None, *, whole: bool = False) -> None:
        """Notes which documents are there after a change that was perhaps made; `whole`: wholly or not at all."""
        held = self._held[key]
        before = {name: held.get(name) for name in names}
        seen = {name: self._version(key, name) for name in names}
        if any(seen[name] not in (before[name], version) for name in names):
            self.faults.append(f"there were {before}, then perhaps {version}, and there are {seen}")
        if whole and len({seen[name] == version for name in names}) > 1:
            self.faults.append(f"a half of a change is there: {seen}")
        for name in names:
            held.pop(name, None)
            if (there := seen[name]) is not None:
                held[name] = there

    def _version(self, key: str, name: str) -> int | None:
        """The version of a document that is there; None if it is not."""
        response = self._send(key, "GET", f"/v1/banks/{key}/document", params={"id": name})
        if response.status_code == 404:
            return None
        return _version_of(response.raise_for_status().json()["text"])

    def check(self) -> None:
        """Looks for every acknowledged document, for others, and for what the retriever finds. No client may ask."""
        for key, held in self._held.items():
            listed = self._send(key, "GET", f"/v1/banks/{key}/documents", params={"limit": 1000}).raise_for_status()
            there = {one["id"] for one in listed.json()["data"]}
            if there != set(held):
                self.faults.append(f"lost {sorted(set(held) - there)}, too many {sorted(there - set(held))}"[:300])
            for name in there & set(held):
                if (version := self._version(key, name)) != held[name]:
                    self.faults.append(f"{name} has the version {version}, not {held[name]}")
                self.found += 1
            query = {"query": "Which report of the board?", "k": 100}
            for hit in self._send(key, "POST", f"/v1/banks/{key}/search", json=query).raise_for_status().json()["data"]:
                if held.get(hit["id"]) != _version_of(hit["text"]):
                    self.faults.append(
                        f"the retriever finds {hit['text']!r:.100}, not the version {held.get(hit['id'])}"
                    )

    def compact(self) -> None:
        """Makes the banks' files as small as their contents."""
        for key in KEYS:
            self._send(key, "POST", f"/v1/banks/{key}/compact").raise_for_status()


def _text(name: str, version: int) -> str:
    return f"Report {name} of the board of Rainga Press, version {version}."


def _version_of(text: str) -> int:
    """The version that a text names; 0 for a text of the bank's first ones."""
    return int("".join(filter(str.isdigit, text.rpartition(", version ")[2]))) if ", version " in text else 0


def _row(name: str, text: str) -> str:
    return json.dumps({"id": name, "text": text})


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
            try:
                kind = request(number, chance)
            except Exception as error:  # a connection that breaks though nobody killed the server, or no JSON
                kind = f"error {type(error).__name__}: {error}"
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
