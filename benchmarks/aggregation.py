"""Aggregation of banks of up to a million documents: time, memory and bandwidth, beside the published way.

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

IMPLEMENTATIONS = {
    "published": "published way",
    "kept": "ours, kept",
    "streamed": "ours, streamed",
    "codebook": "ours, codebook",
}
_MB = 1e6


def main(
    documents: Annotated[int, typer.Option(min=1, help="Documents of the comparison with the published way.")] = 1665,
    questions: Annotated[int, typer.Option(min=1, help="Questions that are asked at once.")] = 16,
    streamed: Annotated[str, typer.Option(help="Sizes of banks that are projected for each batch.")] = (
        "1665,10000,100000"
    ),
    codebook: Annotated[str, typer.Option(help="Sizes of banks that are kept as codes.")] = "1665,100000,1000000",
    codes: Annotated[int, typer.Option(min=1, help="Vectors of the codebook.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="Each is timed so often; the median counts.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Memory tokens of a document, and of a question (T).")] = 12,
    width: Annotated[int, typer.Option(min=1, help="Width of a memory token (D).")] = 768,
    blocks: Annotated[int, typer.Option(min=1, help="Cross-attention blocks.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 8,
    head_width: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 96,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU if there is one.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Measure aggregation over a memory bank, and compare it with a plain re-statement of the published way.

    The published way repeats the bank for each question, and each block computes its normalisation, keys and values
    anew. Ours keeps keys and values, or streams the bank where they would not fit: projects it chunk by chunk, once for
    all questions. Either way attention is exact. A codebook's attention is over its codes, with their counts. Every way
    is checked to give the result of direct attention.

    Networks and banks are random, without a document prior, in float32. Rows repeat after 1,665 and are generated as
    they are read, so that a bank of any size takes no memory of its own. Extra memory is that at the peak of a process
    that does nothing else, beyond bank, network and what is kept. The bytes to read at least are the keys and values
    that are kept, or the bank once for each block; a plain copy of a large tensor says what the machine can move.
    """
    from dataclasses import asdict

    import torch
    from rich.console import Console

    from benchmarks.aggregation_cases import Case, Sizes, compared, measured
    from benchmarks.measure import copy_bandwidth, in_child, write_json

    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
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
        *(Case("codebook", rows, questions, codes) for rows in _numbers(codebook)),
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
    """`"10,20"` as numbers."""
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

    sizes = {"documents": case.documents, "questions": case.questions, "codes": case.codes}
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
