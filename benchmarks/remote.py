"""What questions to a bank in an object store cost, against the same bank on a disk.

python -m benchmarks.remote --help
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.harness.command import OutputOption, SeedOption
from eval.harness.streams import DataOption
from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from mac_rag.model import MACModel

_BUCKET = "banks"


def main(
    folder: Annotated[Path, typer.Argument(help="Folder of the bank. A bank that is there is used again.")],
    model: Annotated[str, typer.Option(help="A MAC model: a name or a folder.")] = "mac-small",
    data: DataOption = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents of the test stream, from its beginning.")] = 1665,
    questions: Annotated[int, typer.Option(min=3, help="Questions, each asked alone.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Readings of each kind, in turns; the median counts.")] = 3,
    delay: Annotated[
        float, typer.Option(min=0, help="Seconds that requests made at the same time take longer, as far away.")
    ] = 0.0,
    seed: SeedOption = 0,
    output: OutputOption = None,
) -> None:
    """Open a bank and ask questions: from the disk, from an S3 server, and from that with a warm cache.

    The server (moto) runs on this machine in a process of its own.
    """
    import os
    import statistics
    import tempfile
    from itertools import count

    from benchmarks.measure import timed, write_json
    from eval.harness.protocol import adapt
    from eval.harness.streams import open_stream
    from mac_rag.cache import CACHE_VARIABLE
    from mac_rag.engine import MACEngine
    from mac_rag.memory import MemoryBank
    from mac_rag.memory.storage.remote.upload import upload
    from mac_rag.model import MACModel

    loaded = MACModel.from_pretrained(model, device="cpu")
    stream, _ = open_stream(data, "test", documents, questions, seed=seed, scale="tiny")
    if not MemoryBank.exists(folder):
        with MemoryBank.create_on_commit(folder, loaded.fingerprint) as bank:
            adapt(MACEngine(loaded, bank), stream.documents, progress=True)
    asked = [question.question for question in stream.questions]
    url, caches = f"s3://{_BUCKET}/bank", count()
    found: dict[str, list[dict[str, float]]] = {"disk": [], "store": [], "store, cached": []}
    with _server() as address, tempfile.TemporaryDirectory() as place:
        os.environ |= {
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        import fsspec

        fsspec.filesystem("s3").mkdir(_BUCKET)
        seconds, put = timed(lambda: upload(folder, url))
        say(f"upload: {put.documents:,} documents, {put.files} files, {put.bytes / 2**20:,.1f} MiB, {seconds:.2f} s")
        _measure(loaded, folder, asked[:2], 0)  # what is slow only once
        for _ in range(rounds):
            os.environ[CACHE_VARIABLE] = str(Path(place, str(next(caches))))
            for kind, rows in found.items():
                rows.append(_measure(loaded, folder if kind == "disk" else url, asked, delay))
    table = {
        kind: {name: statistics.median(row[name] for row in rows) for name in rows[0]} for kind, rows in found.items()
    }
    for kind, row in table.items():
        say(" | ".join([f"{kind:<14}", *(f"{name} {value:,.4g}" for name, value in row.items())]))
    if output is not None:
        write_json(output, {"model": model, "documents": put.documents, "bytes": put.bytes, "delay": delay, **table})


def _measure(model: MACModel, place: Path | str, asked: list[str], delay: float) -> dict[str, float]:
    """Seconds of opening, of the first question and of later ones, with requests and MiB."""
    import statistics
    from functools import partial

    from benchmarks.measure import timed
    from mac_rag.engine import MACEngine
    from mac_rag.memory import MemoryBank

    with _traffic(delay) as traffic:
        found: dict[str, float] = {}

        def note(name: str, seconds: list[float]) -> None:
            found[f"{name} s"] = statistics.median(seconds)
            for what, value in traffic.items():
                found[f"{name} {what}"] = value / len(seconds)
                traffic[what] = 0

        seconds, bank = timed(lambda: MemoryBank.open(place))
        note("opening", [seconds])
        engine = MACEngine(model, bank)
        note("first", [timed(lambda: engine.aggregate(asked[:1]))[0]])
        note("later", [timed(partial(engine.aggregate, [one]))[0] for one in asked[1:]])
    return found


@contextmanager
def _traffic(delay: float) -> Iterator[dict[str, float]]:
    """Counts what object stores are asked for, and lets it take longer."""
    import time
    from unittest.mock import patch

    from mac_rag.memory.storage.remote.object_store import ObjectStore

    counts: dict[str, float] = {"requests": 0, "MiB": 0}
    retried, count = ObjectStore._retried, ObjectStore._count

    def delayed(store: ObjectStore, *arguments: Any) -> Any:
        time.sleep(delay)
        return retried(store, *arguments)

    def counted(store: ObjectStore, requests: int, received: int) -> None:
        counts["requests"] += requests
        counts["MiB"] += received / 2**20
        count(store, requests, received)

    with patch.object(ObjectStore, "_retried", delayed), patch.object(ObjectStore, "_count", counted):
        yield counts


@contextmanager
def _server() -> Iterator[str]:
    """Address of an S3 server in a process of its own."""
    from multiprocessing import get_context

    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        process.terminate()
        process.join()


def _serve(said: Connection) -> None:
    import logging
    import threading

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    said.send(f"http://{host}:{port}")
    threading.Event().wait()


if __name__ == "__main__":
    run_command(main)
