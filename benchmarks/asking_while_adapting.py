"""What a question costs while its engine adapts, against one beside another process that does the same work.

python -m benchmarks.asking_while_adapting --help
"""

from __future__ import annotations

import multiprocessing
import threading
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.harness.command import SeedOption
from eval.harness.streams import DataOption
from mac_rag.cli.run import run_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mac_rag.data.types import Document
    from mac_rag.engine import MACEngine

_ENOUGH = -1  # the count of a worker that is to end


def main(
    model: Annotated[str, typer.Option(help="A MAC model: a name or a folder.")] = "mac-small",
    data: DataOption = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents of the bank.")] = 300,
    load: Annotated[int, typer.Option(min=1, help="Documents of it that are adapted again and again.")] = 16,
    questions: Annotated[int, typer.Option(min=1, help="Questions of a round, one after the other.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each takes all ways in turns.")] = 3,
    seed: SeedOption = 0,
) -> None:
    """Time questions alone, while a thread adapts their engine, and while another process adapts its own engine."""
    import statistics
    from functools import partial

    from benchmarks.measure import timed
    from eval.harness.streams import open_stream
    from mac_rag.engine import MACEngine
    from mac_rag.errors import ConfigError
    from mac_rag.model import MACModel

    stream, _ = open_stream(data, "test", documents, 3 * questions * (rounds + 1), seed=seed, scale="tiny")
    if len(stream.questions) < 3 * questions * (rounds + 1):
        raise ConfigError(f"{stream.name} has {len(stream.questions)} questions; ask fewer, or add --documents")
    engine = MACEngine(MACModel.from_pretrained(model))
    engine.adapt(stream.documents, progress=True)
    changed = stream.documents[:load]
    spawn = multiprocessing.get_context("spawn")
    working: dict[str, Any] = {"a thread": threading.Event(), "a process": spawn.Event()}
    resting: dict[str, Any] = {"a thread": threading.Event(), "a process": spawn.Event()}
    counts = {"a thread": spawn.Value("l", 0), "a process": spawn.Value("l", 0)}
    signals = {way: (working[way], resting[way], counts[way]) for way in working}
    thread = threading.Thread(target=_adapt_for_ever, args=(engine, changed, *signals["a thread"]), daemon=True)
    process = spawn.Process(target=_adapt_elsewhere, args=(model, changed, *signals["a process"]), daemon=True)
    thread.start()
    process.start()
    resting["a process"].wait()
    ways = ["alone", "a thread", "a process"]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    adapted = dict.fromkeys(ways, 0)
    asked = iter(stream.questions)
    for turn in range(rounds + 1):
        for way in ways:
            if way in working:
                before = counts[way].value
                resting[way].clear()
                working[way].set()
            for _ in range(questions):
                elapsed, _ = timed(partial(engine.answer, [next(asked).question]))
                if turn:  # the first round warms up
                    seconds[way].append(elapsed)
            if way in working:
                working[way].clear()
                resting[way].wait()
                adapted[way] += counts[way].value - before
    counts["a thread"].value = _ENOUGH
    working["a thread"].set()
    thread.join()
    process.terminate()
    process.join()
    typer.echo(f"{rounds * questions} questions, {documents} documents of {stream.name}, {model}, seconds a question:")
    beside = statistics.median(seconds["a process"])
    for way in ways:
        middle, worst = statistics.median(seconds[way]), sorted(seconds[way])[int(0.95 * len(seconds[way]))]
        label = way if way == "alone" else f"while {way} adapts"
        typer.echo(
            f"  {label:26s} median {middle:6.3f}, 95th percentile {worst:6.3f}, "
            f"{middle / beside:4.2f} of that beside a process; {adapted[way]} documents adapted"
        )


def _adapt_for_ever(engine: MACEngine, documents: Sequence[Document], working: Any, resting: Any, count: Any) -> None:
    """Adapts to other versions of some documents as long as it is told to work."""
    from mac_rag.data.types import Document

    version = 0
    while True:
        if not working.is_set():
            resting.set()
            working.wait()
        if count.value == _ENOUGH:
            return
        version += 1
        engine.adapt([Document(each.id, f"Version {version}. {each.text}") for each in documents])
        count.value += len(documents)


def _adapt_elsewhere(model: str, documents: Sequence[Document], *signals: Any) -> None:
    from mac_rag.engine import MACEngine
    from mac_rag.model import MACModel

    _adapt_for_ever(MACEngine(MACModel.from_pretrained(model)), documents, *signals)


if __name__ == "__main__":
    run_command(main)
