"""Accuracy and bytes of a bank's rows by their dtype: `python -m benchmarks.row_numbers --help`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from eval.harness.command import SeedOption
from eval.harness.streams import DataOption
from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from mac_rag.bank.rows import RowDtype


def main(
    model: Annotated[str, typer.Option(help="A MAC model: a name or a folder.")] = "mac-small",
    data: DataOption = None,
    documents: Annotated[int, typer.Option(min=1, help="Documents of the test stream, from its beginning.")] = 500,
    questions: Annotated[int, typer.Option(min=1, help="Questions, drawn from all.")] = 1000,
    seed: SeedOption = 0,
) -> None:
    """Answer the same questions from the memory of the same documents alone, kept in different numbers.

    F1 and exact match are in percent; the interval is that of the difference in F1 from float32, over questions, at a
    level of 95 %. Bytes are those of the bank on disk. Product codes are measured if the model has codebooks for them.
    """
    from eval.harness.bootstrap import paired_interval
    from eval.harness.protocol import judge
    from eval.harness.streams import open_stream
    from mac_rag.bank import MemoryBank
    from mac_rag.bank.overview import put_with_overview
    from mac_rag.bank.rows import RowDtype
    from mac_rag.engine import MACEngine
    from mac_rag.model import AmortizedModel

    loaded = AmortizedModel.from_pretrained(model, device="cpu")
    stream, _ = open_stream(data, "test", documents, questions, seed=seed, scale="tiny")
    plan = [loaded.amortization.plan(document.text) for document in stream.documents]
    phi = loaded.amortize_rows([row for rows in plan for row in rows])
    asked = [question.question for question in stream.questions]
    text_bytes = sum(len(document.text.encode()) for document in stream.documents)
    exact: list[float] = []

    def show(dtype: RowDtype) -> None:
        with TemporaryDirectory() as name:
            bank = MemoryBank.create(Path(name) / "bank", loaded.fingerprint, rows=dtype)
            put_with_overview(bank, loaded.aggregation, stream.documents, phi, list(map(len, plan)))
            bank.commit()
            size = sum(file.stat().st_size for file in Path(name).iterdir())
            verdicts = judge(stream.questions, MACEngine(loaded, bank).answer(asked))
            bank.close()
        scores = [100 * verdict.f1 for verdict in verdicts]
        if not exact:
            exact.extend(scores)
        interval = paired_interval(scores, exact, seed=seed)
        em = 100 * sum(verdict.em for verdict in verdicts) / len(verdicts)
        say(
            f"  {dtype:6} F1 {sum(scores) / len(scores):5.2f}  EM {em:5.2f}"
            f"  difference {interval.low:+.2f} to {interval.high:+.2f}"
            f"  {size / len(stream.documents) / 1000:6.1f} kB a document, {size / text_bytes:.0f} times its text"
        )

    say(f"{len(asked):,} questions about {len(stream.documents):,} documents of {stream.name}, {model}:")
    for dtype in get_args(RowDtype):
        if dtype != "pq" or loaded.aggregation.quantizer is not None:
            show(dtype)


if __name__ == "__main__":
    run_command(main)
