"""Cost of a question in a bank in shards, against one bank: `python -m benchmarks.shards --help`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.harness.command import SeedOption
from eval.harness.streams import DataOption
from mac_rag.cli.run import run_command

if TYPE_CHECKING:
    from mac_rag.distributed.transport import RayShards

_SHARDS = (2, 4, 8)


def main(
    model: Annotated[str, typer.Option(help="A MAC model: a name or a folder.")] = "mac-small",
    data: DataOption = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents of the bank.")] = 2000,
    questions: Annotated[int, typer.Option(min=1, help="Questions of one batch.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Batches, each of new questions; the median counts.")] = 5,
    seed: SeedOption = 0,
) -> None:
    """Time phi* of a batch of questions from shards in processes on this machine, and count bytes and round trips.

    One bank and the shards hold the same memory tokens. The shards of one machine share its cores, so that times say
    what the round trips and the merge cost, not what more machines gain. Bytes are those of the arrays that go to the
    shards and come back. The error is the largest difference of phi* from that of the one bank, against the
    largest number of phi*.
    """
    import statistics
    import tempfile
    from functools import partial

    import torch
    from rich.console import Console
    from rich.table import Table

    from benchmarks.measure import timed
    from eval.harness.protocol import adapt
    from eval.harness.streams import open_stream
    from mac_rag.bank import MemoryBank
    from mac_rag.bank.interface import Bank
    from mac_rag.bank.overview import keep_rows_for
    from mac_rag.bank.reader import reader_of
    from mac_rag.config import AttentionConfig
    from mac_rag.data.types import Document
    from mac_rag.distributed import ShardedBank
    from mac_rag.distributed.transport import ShardSettings
    from mac_rag.engine import MACEngine
    from mac_rag.model import AmortizedModel

    console = Console()
    loaded = AmortizedModel.from_pretrained(model)
    stream, _ = open_stream(data, "test", documents, questions * (rounds + 1), seed=seed, scale="tiny")
    encoded, one = MemoryBank(loaded.fingerprint), MemoryBank(loaded.fingerprint)
    keep_rows_for(one, loaded.aggregation)  # as shards do
    adapt(MACEngine(loaded, encoded), stream.documents)

    def fill(bank: Bank) -> None:
        for first in range(0, len(stream.documents), 512):
            some = stream.documents[first : first + 512]
            rows = [encoded[document.id].phi for document in some]
            bank.put([Document(document.id, "") for document in some], torch.cat(rows), list(map(len, rows)))
        bank.commit()

    def ask(banks: tuple[Bank, Bank]) -> tuple[list[list[float]], float]:
        """Seconds of each bank for each batch, asked in turns, and the largest difference of what they find."""
        readers = [reader_of(loaded, bank.snapshot(), AttentionConfig()) for bank in banks]
        seconds: list[list[float]] = [[], []]
        error = 0.0
        for turn in range(rounds + 1):  # the first one projects the banks
            batch = [question.question for question in stream.questions[turn * questions :][:questions]]
            results = []
            for reader, own in zip(readers, seconds, strict=True):
                elapsed, aggregated = timed(partial(reader.aggregate, batch))
                own.append(elapsed)
                results.append(aggregated.tensor)
            error = max(error, float((results[0] - results[1]).abs().max() / results[0].abs().max()))
        return [own[1:] for own in seconds], error

    fill(one)
    table = Table("shards", "batch, s", "one bank, s", "ratio", "bytes a question", "round trips", "error of phi*")
    for count in _SHARDS:
        with tempfile.TemporaryDirectory() as folder:
            settings = ShardSettings.of_new(Path(folder) / "bank", loaded, count)
            with ShardedBank(settings, counting_shards, create=True) as bank:
                fill(bank)
                sent: Any = bank.shards.transport
                sent.trips = sent.bytes = 0
                (alone, sharded), error = ask((one, bank))
                ratio = statistics.median(b / a for a, b in zip(alone, sharded, strict=True))
                times = f"{statistics.median(sharded):.3f}", f"{statistics.median(alone):.3f}", f"{ratio:.2f}"
                traffic = f"{sent.bytes / (questions * (rounds + 1)):,.0f}", f"{sent.trips / (rounds + 1):.0f}"
                table.add_row(f"{count}", *times, *traffic, f"{error:.1e}")
    console.print(
        f"{len(one):,} documents of {stream.name}, batches of {questions}, {model}, {loaded.device.type}, "
        f"{torch.get_num_threads()} threads of torch for one bank, and one in each shard"
    )
    console.print(table)


def counting_shards(settings: Any) -> RayShards:
    """Shards in Ray actors that count what crosses between processes."""
    from collections.abc import Mapping

    from mac_rag.distributed.transport import RayShards, Request

    class CountingShards(RayShards):
        trips = 0
        bytes = 0

        def ask(self, requests: Mapping[int, Request]) -> dict[int, Any]:
            outcomes = super().ask(requests)
            self.trips += 1
            self.bytes += sum(_array_bytes((request.args, request.kwargs)) for request in requests.values())
            self.bytes += _array_bytes(outcomes)
            return outcomes

    return CountingShards(settings)


def _array_bytes(value: Any) -> int:
    """Bytes of all numpy arrays in an object."""
    import numpy as np

    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_array_bytes, value.values()))
    if isinstance(value, tuple | list):
        return sum(map(_array_bytes, value))
    return _array_bytes(vars(value)) if hasattr(value, "__dict__") else 0


if __name__ == "__main__":
    run_command(main)
