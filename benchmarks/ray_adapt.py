"""Bulk adaptation by one process and by Ray's actors: `python -m benchmarks.ray_adapt --help`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from eval.harness.command import SeedOption
from eval.harness.streams import DataOption
from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mac_rag.bank.bank import BankEntry, MemoryBank
    from mac_rag.data.types import Document


def main(
    model: Annotated[str, typer.Option(help="A MAC model: a name or a folder.")] = "mac-tiny",
    data: DataOption = None,
    documents: Annotated[
        int, typer.Option(min=1, help="Number of documents; those of the stream come in versions until it is reached.")
    ] = 20_000,
    actors: Annotated[list[int] | None, typer.Option(min=1, help="Numbers of actors.", show_default="1, 2, 4")] = None,
    seed: SeedOption = 0,
) -> None:
    """Time the adaptation of a new bank on disk, and compare the banks row by row.

    The one process uses one thread, as each actor does. Ray is started before the clock, and the model is loaded by the
    actors after it.
    """
    import json
    from functools import partial
    from pathlib import Path
    from tempfile import TemporaryDirectory

    import torch
    from rich.console import Console
    from rich.table import Column, Table

    from benchmarks.measure import timed
    from eval.harness.streams import open_stream
    from mac_rag.bank.bank import MemoryBank
    from mac_rag.data.readers import read_documents
    from mac_rag.distributed.adapting import RayWorkers
    from mac_rag.distributed.cluster import connected_ray
    from mac_rag.engine import MACEngine
    from mac_rag.model import MACModel

    stream, _ = open_stream(data, "test", min(documents, 2_000), 0, seed=seed, scale="tiny")
    cpus = int(connected_ray().cluster_resources()["CPU"])
    torch.set_num_threads(1)
    loaded = MACModel.from_pretrained(model, device="cpu")
    table = Table(
        Column("adapted by"),
        *(Column(name, justify="right") for name in ("seconds", "documents a second", "times one process")),
        Column("bank"),
        title=f"{documents:,} documents, {stream.name}, {model}, {cpus} CPUs",
    )

    def make(folder: Path, file: Path, count: int | None) -> MemoryBank:
        with MemoryBank.create_on_commit(folder, loaded.fingerprint) as bank:
            workers = None if count is None else RayWorkers(loaded, model, count)
            MACEngine(loaded, bank, workers=workers).adapt(read_documents([file]), progress=True)
        return MemoryBank.open(folder)

    with TemporaryDirectory() as place:
        file = Path(place) / "documents.jsonl"
        with file.open("w") as lines:
            for each in _versions(stream.documents, documents):
                lines.write(json.dumps({"id": each.id, "text": each.text}) + "\n")
        first, expected = timed(partial(make, Path(place) / "one", file, None))
        table.add_row("one process", f"{first:.1f}", f"{documents / first:.1f}", "1.00", "")
        for count in actors or [1, 2, 4]:
            seconds, bank = timed(partial(make, Path(place) / str(count), file, count))
            equal = len(bank) == len(expected) and all(map(_are_equal, bank, expected))
            table.add_row(
                f"{count} actor{'s' * (count > 1)}",
                f"{seconds:.1f}",
                f"{documents / seconds:.1f}",
                f"{first / seconds:.2f}",
                "equal" if equal else "DIFFERENT",
            )
            say(f"{count} actors: {seconds:.1f} s")
    Console().print(table)


def _are_equal(one: BankEntry, other: BankEntry) -> bool:
    """True if two entries are the same but for the time at which they were added."""
    import torch

    def described(entry: BankEntry) -> list[object]:
        return [(each.document_id, each.content_hash, each.metadata) for each in entry.members]

    return described(one) == described(other) and torch.equal(one.phi, other.phi)


def _versions(documents: Sequence[Document], count: int) -> Iterator[Document]:
    """Yields `count` documents: the given ones, then new versions of them."""
    from mac_rag.data.types import Document

    for number in range(count):
        version, place = divmod(number, len(documents))
        document = documents[place]
        yield Document(f"{document.id}/{version}", f"Version {version}. {document.text}" if version else document.text)


if __name__ == "__main__":
    run_command(main)
