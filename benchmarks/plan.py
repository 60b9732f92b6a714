"""Plans a bank in shards: a model of what a question costs, checked by shards in processes on this machine.

python -m benchmarks.plan --help
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.harness.command import SeedOption, whole_numbers
from eval.harness.streams import DataOption
from mac_rag.cli.run import run_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from mac_rag.data.types import Document
    from mac_rag.distributed.transport import ShardSettings
    from mac_rag.model import MACModel

# Documents that are put at a time.
_GROUP = 1024


@dataclass(frozen=True)
class Plan:
    """What a question costs in S shards with n documents each: seconds.

    `asking + messages + each * S + turns * (shard + document * n)`, where `turns` is how many shards have to share a
    core.

    Attributes:
        asking: encoding the question, and the feed-forward networks of the aggregation.
        messages: sending and waiting, whatever the number of shards.
        each: what a shard more adds for the process that asks: its message and its part of the merge.
        shard: a shard's attention, whatever it holds.
        document: what a document more adds to that: its product with the prior.
    """

    asking: float
    messages: float
    each: float
    shard: float
    document: float

    def seconds(self, shards: int, documents: float, cores: int) -> float:
        """Seconds of a question.

        Args:
            shards: S.
            documents: n, documents of a shard.
            cores: cores of all machines together.
        """
        attending = self.shard + self.document * documents
        return self.asking + self.messages + self.each * shards + max(1.0, shards / cores) * attending


@dataclass(frozen=True)
class Measured:
    """A bank in S shards as it was measured.

    Attributes:
        shards: S.
        documents: documents of a shard, in the mean.
        seconds: of a question, the shards in processes.
        asking: seconds of a question without what the shards do.
        attending: seconds that a shard attends for a question.
        bytes: that cross between processes for a question.
    """

    shards: int
    documents: float
    seconds: float
    asking: float
    attending: float
    bytes: float


def fitted(measured: Sequence[Measured], cores: int) -> Plan:
    """The plan that says what was measured, as nearly as it can."""
    import statistics

    import numpy as np

    attending = [each.attending for each in measured]
    document, shard = np.polyfit([each.documents for each in measured], attending, 1)
    asking = statistics.median(each.asking for each in measured)
    left = [each.seconds - asking - max(1.0, each.shards / cores) * each.attending for each in measured]
    slope, messages = np.polyfit([each.shards for each in measured], left, 1)
    return Plan(asking, float(messages), float(slope), float(shard), float(document))


def main(
    model: Annotated[str, typer.Option(help="A MAC model: a name or a folder.")] = "mac-small",
    data: DataOption = None,
    documents: Annotated[int, typer.Option(min=8, help="Documents of the bank.")] = 4000,
    adapted: Annotated[int, typer.Option(min=1, help="Documents that are adapted to; the others are mixtures.")] = 1000,
    shards: Annotated[str, typer.Option(help="Numbers of shards to measure, at least three.")] = "1,2,4,8",
    check: Annotated[int, typer.Option(help="The number of shards that is predicted from the others.")] = 8,
    questions: Annotated[int, typer.Option(min=3, help="Questions, each asked alone; medians count.")] = 20,
    planned: Annotated[int, typer.Option(min=1, help="Documents of the bank to plan.")] = 100_000_000,
    machines: Annotated[str, typer.Option(help="Numbers of machines to plan for.")] = "8,32,128",
    cores: Annotated[int, typer.Option(min=1, help="Cores of such a machine, each of which may have a shard.")] = 16,
    gigabits: Annotated[float, typer.Option(min=0.001, help="Its network, in gigabits a second.")] = 10.0,
    output: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
    seed: SeedOption = 0,
) -> None:
    """Measure banks in shards, fit a model of a question's time to them, check it, and plan a larger bank with it.

    The bank has mixtures of documents, as in benchmarks.scale. The model is fitted to all measured numbers of
    shards but one, which it then predicts. The shards of one machine share its cores, and the model knows that.
    """
    import os
    import tempfile
    from dataclasses import asdict

    import torch
    from rich.console import Console
    from rich.table import Table

    from benchmarks.measure import write_json
    from eval.harness.streams import open_stream
    from mac_rag.errors import ConfigError
    from mac_rag.model import MACModel

    counts = whole_numbers("--shards", shards)
    if check not in counts or len(counts) < 3:
        raise ConfigError(f"--shards {shards} must be three numbers or more, --check {check} one of them")
    torch.set_num_threads(1)  # as shards have
    here = len(os.sched_getaffinity(0))
    loaded = MACModel.from_pretrained(model, device="cpu")
    stream, _ = open_stream(data, "test", min(documents, adapted), questions + 1, seed=seed, scale="tiny")
    real = loaded.amortize([document.text for document in stream.documents], progress=True)
    asked = [question.question for question in stream.questions]
    measured = []
    disk = 0.0
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder) / "bank"
            measured.append(_measure(place, loaded, stream.documents, real, documents, count, asked, seed))
            disk = sum(file.stat().st_size for file in place.rglob("*") if file.is_file()) / documents
    plan = fitted([each for each in measured if each.shards != check], here)
    if plan.document <= 0 or plan.each <= 0:
        raise ConfigError(
            f"a document more costs {plan.document:.2g} s and a shard more {plan.each:.2g} s by these measurements, "
            f"which cannot be: measure more than {documents:,} documents (--documents), on a machine that is idle"
        )

    console = Console()
    console.print(f"{documents:,} documents of {stream.name}, {model}, {here} cores here; milliseconds")
    table = Table("shards", "documents each", "measured", "by the model", "asking", "attending", "bytes a question")
    for each in measured:
        predicted = plan.seconds(each.shards, each.documents, here)
        mark = " (predicted)" if each.shards == check else ""
        table.add_row(
            f"{each.shards}",
            f"{each.documents:,.0f}",
            f"{1000 * each.seconds:.1f}",
            f"{1000 * predicted:.1f}{mark}",
            f"{1000 * each.asking:.1f}",
            f"{1000 * each.attending:.1f}",
            f"{each.bytes:,.0f}",
        )
    console.print(table)
    console.print(" | ".join(f"{name} {1e3 * value:.3g} ms" for name, value in asdict(plan).items()))

    overview = _overview_bytes(loaded, real)
    per_shard = measured[-1].bytes / measured[-1].shards
    shard_network = per_shard * 8 / (gigabits * 1e9)  # seconds

    def planned_seconds(total: int) -> float:
        return plan.seconds(total, planned / total, total) + total * shard_network

    console.print(
        f"{planned:,} documents, {cores} cores on each machine, {gigabits:g} Gbit/s, as many shards as are fastest"
    )
    table = Table(
        "machines", "shards", "documents on each", "disk GB", "memory GB", "a question, ms", "of it network", "bytes"
    )
    rows: list[dict[str, Any]] = []
    for number in whole_numbers("--machines", machines):
        total = min(range(number, number * cores + 1, number), key=planned_seconds)
        row = {
            "machines": number,
            "shards": total,
            "documents": planned / number,
            "disk_gb": planned / number * disk / 1e9,
            "memory_gb": planned / number * overview / 1e9,
            "seconds": planned_seconds(total),
            "network": total * shard_network,
            "bytes": total * per_shard,
        }
        rows.append(row)
        table.add_row(
            f"{number}",
            f"{total}",
            f"{row['documents']:,.0f}",
            f"{row['disk_gb']:,.0f}",
            f"{row['memory_gb']:,.1f}",
            f"{1e3 * row['seconds']:,.0f}",
            f"{1e3 * row['network']:,.1f}",
            f"{row['bytes']:,.0f}",
        )
    console.print(table)
    if output is not None:
        figures = {"measured": [asdict(each) for each in measured], "plan": asdict(plan), "planned": rows}
        write_json(output, {"model": model, "documents": documents, "cores": here, "check": check, **figures})


def _measure(
    place: Path,
    model: MACModel,
    originals: Sequence[Document],
    real: Tensor,
    documents: int,
    shards: int,
    asked: Sequence[str],
    seed: int,
) -> Measured:
    """Makes a bank in shards, and asks it in processes and in this one."""
    import statistics

    from benchmarks.generated import mixed_documents
    from benchmarks.shards import counting_shards
    from mac_rag.distributed import ShardedBank
    from mac_rag.distributed.transport import ShardSettings

    lexical = model.aggregation.lexical_vectors
    with ShardedBank(ShardSettings.of_new(place, model, shards), counting_shards, create=True) as bank:
        for group, phi in mixed_documents(originals, real, lexical, 0, documents, _GROUP, seed):
            bank.put(group, phi)
            bank.commit()
        sent: Any = bank.shards.transport
        sent.trips = sent.bytes = 0
        seconds = _asked(model, bank, asked)
        crossed = sent.bytes / len(asked)
        rows = [directory.rows for directory in bank.directories]
    settings = ShardSettings.of(place, model, write=False)
    with ShardedBank(settings, _TimedShards) as bank:
        timed: Any = bank.shards.transport
        attending, whole = [], []
        for one in asked:
            timed.seconds = 0.0
            [taken] = _asked(model, bank, [one])
            attending.append(timed.seconds / shards)
            whole.append(taken - timed.seconds)
    return Measured(
        shards,
        sum(rows) / shards,
        statistics.median(seconds[1:]),
        statistics.median(whole[1:]),
        statistics.median(attending[1:]),
        crossed,
    )


def _asked(model: MACModel, bank: Any, asked: Sequence[str]) -> list[float]:
    """Seconds of each question; what is remembered of a question is not used."""
    from functools import partial

    from benchmarks.measure import timed
    from mac_rag.config import AttentionConfig
    from mac_rag.memory.views.reader import reader_of

    reader = reader_of(model, bank.snapshot(), AttentionConfig())
    return [timed(partial(reader.aggregate, [one]))[0] for one in asked]


class _TimedShards:
    """Shards in this process, one after the other, which count the seconds that they take."""

    def __init__(self, settings: ShardSettings) -> None:
        from mac_rag.distributed.shard import Shard

        self.seconds = 0.0
        self._settings = settings
        self._shards: dict[int, Shard] = {}

    def start(self, number: int, *, create: bool = False) -> None:
        from mac_rag.distributed.shard import Shard

        assert not create
        self._shards[number] = Shard(*self._settings.arguments(number, self._settings.network, "cpu"))

    def started(self, number: int, *, wait: bool) -> Any:
        return self._shards[number].open()

    def ask(self, requests: Any) -> dict[int, Any]:
        from functools import partial

        from benchmarks.measure import timed

        outcomes = {}
        for number, request in requests.items():
            call = getattr(self._shards[number], request.method)
            seconds, outcomes[number] = timed(partial(call, *request.args, **request.kwargs))
            self.seconds += seconds
        return outcomes

    def close(self) -> None:
        for shard in self._shards.values():
            shard.close()


def _overview_bytes(model: MACModel, real: Tensor) -> float:
    """Bytes of a document that are read of all before the first question, and stay in memory."""
    from mac_rag.memory.views.overview import layout_for

    rows = layout_for(model.aggregation).encode(real[:256].float())
    return sum(column.nbytes for column in rows.overview.columns.values()) / len(rows)


if __name__ == "__main__":
    run_command(main)
