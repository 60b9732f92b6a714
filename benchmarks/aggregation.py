"""Aggregation of banks of up to a million documents: time, memory and bandwidth, against the published method.

python -m benchmarks.aggregation --help
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mac_rag.cli.run import run_command

if TYPE_CHECKING:
    from rich.table import Table

    from benchmarks.aggregation_cases import Case, Measurement

IMPLEMENTATIONS = {"published": "published", "kept": "ours, kept", "streamed": "ours, streamed"}
_MB = 1e6


def main(
    documents: Annotated[
        int, typer.Option(min=1, help="Documents of the comparison with the published implementation.")
    ] = 1665,
    questions: Annotated[int, typer.Option(min=1, help="Questions of one batch.")] = 16,
    streamed: Annotated[
        str, typer.Option(help="Sizes of the banks that are projected anew for each batch, separated by commas.")
    ] = ("1665,10000,100000"),
    rounds: Annotated[int, typer.Option(min=1, help="Timings of each; the median counts.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Memory tokens of a document, and of a question (T).")] = 12,
    width: Annotated[int, typer.Option(min=1, help="Width of a memory token (D).")] = 768,
    blocks: Annotated[int, typer.Option(min=1, help="Cross-attention blocks.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 8,
    head_width: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 96,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Measure aggregation over a memory bank, and compare it with a re-implementation of the published method.

    The published implementation repeats the bank for each question, and each block computes its normalisation, keys and
    values anew. Ours caches keys and values. Where they would not fit, it streams the bank: it projects the bank chunk
    by chunk, once for all questions. Both are exact. The result of every implementation is checked against direct
    attention.

    Networks and banks are random float32 tensors without a document prior. Rows repeat after 1,665 and are generated
    when they are read, so a bank of any size takes no memory. Extra memory is the peak of a process of its own, beyond
    bank, network and cache. The minimum of bytes to read is the cached keys and values, or the bank once for each
    block; the bandwidth of the machine is that of a plain copy of a large tensor.
    """
    from dataclasses import asdict

    import torch
    from rich.console import Console

    from benchmarks.aggregation_cases import Case, Sizes, compared, measured
    from benchmarks.measure import copy_bandwidth, in_child, write_json
    from mac_rag.lm.devices import default_device

    place = default_device(device)
    sizes = Sizes(tokens, width, blocks, heads, head_width)
    console = Console()
    console.print(
        f"T={tokens}, D={width}, {blocks} blocks, {heads} heads of {head_width}; {place}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    fast, slow = compared(sizes, documents, questions, rounds, place)
    bandwidth = copy_bandwidth(place)
    cases = [
        Case("published", documents, questions),
        Case("kept", documents, questions),
        Case("kept", documents, 1),
        *(Case("streamed", rows, questions) for rows in _numbers(streamed)),
    ]
    measurements = {}
    for case in cases:
        measurements[case] = in_child(measured, case, sizes, place, rounds)
        name = IMPLEMENTATIONS[case.implementation]
        console.print(f"[dim]{name}, {case.documents:,} documents: {measurements[case].seconds:.2f} s[/dim]")
    console.print(_comparison(measurements[cases[0]], measurements[cases[1]], cases[0], fast, slow))
    console.print(_scaling(measurements, bandwidth))
    if output is not None:
        result = {
            "sizes": asdict(sizes),
            "device": str(place),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "comparison": {"ours_seconds": fast, "published_seconds": slow, "ratio": slow / fast},
            "copy_bytes_per_second": bandwidth,
            "cases": [_entry(case, measurement) for case, measurement in measurements.items()],
        }
        write_json(output, result)


def _numbers(text: str) -> list[int]:
    """The numbers of a text like "10,20"."""
    try:
        numbers = [int(number) for number in text.split(",") if number.strip()]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of sizes; give them as 1665,10000") from None
    if min(numbers, default=1) < 1:
        raise typer.BadParameter(f"{text!r} has a size below 1; a bank has at least one document")
    return numbers


def _entry(case: Case, measurement: Measurement) -> dict[str, Any]:
    """A case and its measurement in the JSON file; `way`, the key of its implementation, is that of earlier files."""
    from dataclasses import asdict

    sizes = {"documents": case.documents, "questions": case.questions}
    return {"way": case.implementation, **sizes, **asdict(measurement)}


def _comparison(published: Measurement, kept: Measurement, case: Case, fast: float, slow: float) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    title = f"{case.questions} questions of {case.documents:,} documents"
    table = Table("", "seconds", "extra MB", "kept MB", title=title, box=SIMPLE)
    table.add_row(IMPLEMENTATIONS["published"], f"{slow:.3f}", f"{published.extra_bytes / _MB:.0f}", "")
    table.add_row(
        IMPLEMENTATIONS["kept"], f"{fast:.3f}", f"{kept.extra_bytes / _MB:.0f}", f"{kept.kept_bytes / _MB:.0f}"
    )
    table.add_row("  and once to project them", f"{kept.kept_seconds:.3f}", "", "")
    share = published.extra_bytes / max(1, kept.extra_bytes)
    table.add_row("ratio", f"{slow / fast:.1f}x", f"{share:.1f}x", "", style="bold")
    return table


def _scaling(measurements: dict[Case, Measurement], bandwidth: float) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=f"a plain copy moves {bandwidth / 1e9:.1f} GB/s", box=SIMPLE)
    table.add_column("", no_wrap=True)
    for column in ("documents", "asked", "seconds", "extra MB", "read MB", "GB/s", "of copy"):
        table.add_column(column, justify="right", no_wrap=True)
    for case, measurement in measurements.items():
        achieved = measurement.moved_bytes / measurement.seconds
        table.add_row(
            IMPLEMENTATIONS[case.implementation],
            f"{case.documents:,}",
            f"{case.questions}",
            f"{measurement.seconds:.3f}",
            f"{measurement.extra_bytes / _MB:.0f}",
            f"{measurement.moved_bytes / _MB:.0f}",
            f"{achieved / 1e9:.2f}",
            f"{achieved / bandwidth:.1%}",
        )
    return table


if __name__ == "__main__":
    run_command(main)
