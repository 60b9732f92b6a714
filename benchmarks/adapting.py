"""Documents adapted per second, against sentence-transformers: `python -m benchmarks.adapting --help`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from eval.harness.streams import DataOption
from mac_rag.cli.run import run_command

_THREADS = 2
_RETRIEVERS = ("bm25", "minilm")  # take the documents too


def main(
    model: Annotated[str, typer.Option(help="A MAC model: a name or a folder.")] = "mac-small",
    data: DataOption = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents of the stream, from its beginning.")] = 500,
    rounds: Annotated[int, typer.Option(min=1, help="Timings of each, in turns; the median counts.")] = 5,
) -> None:
    """Adapt to distinct documents, and encode the same ones with sentence-transformers, in turns on two CPU threads.

    sentence-transformers sorts texts by length and takes its default batch size. Each adaptation begins with an empty
    bank. The ratio is the median of the ratios of each round, so that other load on the machine affects both sides.
    """
    import statistics
    from tempfile import TemporaryDirectory

    import torch
    from rich.console import Console
    from rich.table import Table
    from sentence_transformers import SentenceTransformer

    from benchmarks.measure import timed
    from eval.harness.streams import open_stream
    from mac_rag.bank import MemoryBank
    from mac_rag.engine import MACEngine
    from mac_rag.lm.minilm import minilm_folder
    from mac_rag.model import AmortizedModel
    from mac_rag.retrieval.registry import make_retriever

    torch.set_num_threads(_THREADS)
    stream, _ = open_stream(data, "train", documents, 0, seed=0, scale="tiny")
    texts = [document.text for document in stream.documents]
    loaded = AmortizedModel.from_pretrained(model, device="cpu")
    sentences = SentenceTransformer(str(minilm_folder()), device="cpu")
    length = sum(map(len, sentences.tokenizer(texts, add_special_tokens=False)["input_ids"])) / len(texts)

    def adapt(bank: MemoryBank | None, retriever: str | None = None) -> float:
        made = None if retriever is None else make_retriever(retriever)
        engine = MACEngine(loaded, bank, made)
        return timed(lambda: engine.adapt(stream.documents))[0]

    def adapt_on_disk() -> float:
        with TemporaryDirectory() as folder, MemoryBank.create(Path(folder) / "bank", loaded.fingerprint) as bank:
            return adapt(bank)

    sides: dict[str, Callable[[], float]] = {
        "sentence-transformers": lambda: timed(lambda: sentences.encode(texts, show_progress_bar=False))[0],
        "bank in memory": lambda: adapt(None),
        "bank on disk": adapt_on_disk,
    }
    for name in _RETRIEVERS:
        sides[f"bank in memory, {name}"] = lambda name=name: adapt(None, name)  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, run in sides.items():
            elapsed = run()
            if turn > 0:
                seconds[name].append(elapsed)
    table = Table("", "documents a second", "times sentence-transformers")
    for name, own in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds["sentence-transformers"], own, strict=True))
        speed = len(texts) / statistics.median(own)
        table.add_row(name, f"{speed:.1f}", f"{ratio:.2f}")
    console = Console()
    console.print(
        f"{len(texts):,} documents of {stream.name}, {length:.0f} tokens on average, {model}, {_THREADS} threads"
    )
    console.print(table)


if __name__ == "__main__":
    run_command(main)
