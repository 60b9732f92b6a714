"""Memory and accuracy of hierarchical aggregation and bounded banks.

python -m benchmarks.memory_vs_accuracy --help
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import say

if TYPE_CHECKING:
    from eval.harness.aggregation_methods import Measurement

_MB = 1e6


def main(
    model: Annotated[str, typer.Option(help="A MAC model: a name or a folder.")] = "mac-tiny",
    documents: Annotated[int, typer.Option(min=4, help="Documents of the stream, newswire's test split.")] = 1665,
    questions: Annotated[
        int | None, typer.Option(min=1, help="At most this many questions, drawn from all.", show_default="all")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Questions that are aggregated at once.")] = 16,
    subgroups: Annotated[str, typer.Option(help="Sizes M of hierarchical aggregation.")] = "4,8,16,32,64,128,256",
    seed: Annotated[int, typer.Option(help="Random seed of the stream, the questions and the reductions.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="The JSON file; the plots are beside it.", show_default="results/<benchmark>-<time>"),
    ] = None,
) -> None:
    """Measure answers from memory alone against the memory of the bank and of its aggregation.

    Hierarchical aggregation (figure 5 of the paper) is compared with the whole bank in one softmax and with streaming.
    Reductions (figure 7) keep 75, 50 and 25 % of the stream's documents as entries.

    Keys and values are not cached: each aggregation projects the rows that it needs. Memory is the peak of all tensors
    that it allocates for one batch of questions, as PyTorch's allocator records it, beyond the stored bank.
    The encoding of questions and the LM are not included.
    """
    import json
    import os
    import shlex
    import sys
    from dataclasses import asdict

    from eval.harness.command import whole_numbers
    from eval.harness.protocol import adapt, some_questions
    from eval.harness.results import provenance, result_path

    # The profiler that counts allocations announces each start and stop on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    path = result_path(output, "memory_vs_accuracy")
    sizes = whole_numbers("--subgroups", subgroups)

    from benchmarks.memory_plots import plot
    from eval.harness.aggregation_methods import hierarchical_methods, measure, reduction_methods
    from mac_rag.atomic_files import write_text
    from mac_rag.data.newswire.generate import generate
    from mac_rag.engine import MACEngine
    from mac_rag.memory import MemoryBank
    from mac_rag.model import MACModel

    loaded = MACModel.from_pretrained(model, device=device)
    stream = some_questions(generate("test", documents, seed=seed), questions, seed)
    bank = MemoryBank(loaded.fingerprint)
    engine = MACEngine(loaded, bank)
    adapt(engine, stream.documents, progress=True)
    rows: list[Measurement] = []
    for methods in (
        hierarchical_methods(loaded, bank, sizes),
        reduction_methods(loaded, bank, stream.documents, seed),
    ):
        rows += [measure(loaded, method, stream.questions, batch_size)[0] for method in methods]
    report = provenance("memory_vs_accuracy") | {
        "command": shlex.join(["python", "-m", "benchmarks.memory_vs_accuracy", *sys.argv[1:]]),
        "model": {"name": model, "fingerprint": loaded.fingerprint, "device": str(loaded.device)},
        "data": {
            "name": "newswire",
            "split": "test",
            "documents": documents,
            "questions": len(stream.questions),
            "seed": seed,
        },
        "batch_size": batch_size,
        "rows": [asdict(row) for row in rows],
    }
    git = report.pop("git")
    report["git"] = None if git is None else git.model_dump(mode="json")
    write_text(path, json.dumps(report, indent=1) + "\n")
    show(rows, f"{model}, {documents:,} documents, {len(stream.questions):,} questions, {batch_size} at a time")
    for drawn in plot(rows, path):
        say(f"Plot: {drawn}")
    say(f"Result: {path}")


def show(rows: Sequence[Measurement], title: str) -> None:
    """Prints the measurements as a table, one section for each group."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", title=title, title_justify="left")
    for column in ("EM %", "F1 %", "bank MB", "peak MB", "aggregation s"):
        table.add_column(column, justify="right")
    group = ""
    for row in rows:
        if group and group != row.group:
            table.add_section()
        group = row.group
        memory = (f"{row.bank_bytes / _MB:.2f}", f"{row.peak_bytes / _MB:.2f}", f"{row.aggregation_seconds:.1f}")
        table.add_row(row.name, f"{100 * row.em:.1f}", f"{100 * row.f1:.1f}", *memory)
    Console().print(table)


if __name__ == "__main__":
    run_command(main)
