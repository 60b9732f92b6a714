"""Two results question by question, with paired bootstrap intervals: `python -m eval.compare A.json B.json`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from mac_rag.cli.run import run_command
from mac_rag.cli.terminal import cell, say, show_table

if TYPE_CHECKING:
    from eval.harness.bootstrap import Interval
    from eval.harness.results import Sample, Verdict

FIGURES = {"em": "EM", "f1": "F1", "em_prefix": "prefix"}
Pair = tuple["dict[str, Verdict]", "dict[str, Verdict]"]  # verdicts of A and of B on one question, by row


class Difference(NamedTuple):
    """A figure of a row of A and of a row of B over the same questions: means, 0 to 1, and the interval of A less B."""

    row: str
    against: str
    figure: str
    ours: float
    theirs: float
    interval: Interval


def main(
    a: Annotated[Path, typer.Argument(help="The result file of A.")],
    b: Annotated[Path, typer.Argument(help="The result file of B.")],
    row: Annotated[
        list[str] | None,
        typer.Option(help="A row of A; may be given several times.", show_default="all rows that B has too"),
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="The row of B to compare with.", show_default="the row of the same name")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the bootstrap.")] = 0,
) -> None:
    """Compare two results over the questions that both asked: figures of each row, and A less B with 95 % intervals.

    Both results must be of the same data set and split. To compare two rows of one result, give its file twice.
    """
    from eval.harness.results import Result
    from mac_rag.errors import DataError

    ours, theirs = Result.read(a), Result.read(b)
    for path, result in ((a, ours), (b, theirs)):
        if result.samples is None:
            raise DataError(f"{path} ({result.experiment}) asked no questions that could be compared one by one")
    if ours.data and theirs.data:
        one, other = (f"{data.name} ({data.split})" for data in (ours.data, theirs.data))
        if one != other:
            raise DataError(f"the results are of different data: {a} of {one}, {b} of {other}")
    pairs = shared_samples(ours.read_samples(a), theirs.read_samples(b), a, b)
    differences = compare(pairs, _chosen_rows(pairs, row or [], against, a, b), seed)
    say(f"A = {a}")
    say(f"B = {b}")
    say(f"{len(pairs):,} questions; percent; * where the 95 % interval leaves out zero")
    _show(differences)
    for path, result in ((a, ours), (b, theirs)):
        count = result.samples.count if result.samples else 0
        if count != len(pairs):
            say(f"{count - len(pairs):,} of the {count:,} questions of {path} were not asked in the other.")
    if ours.data and theirs.data and ours.data.documents != theirs.data.documents:
        say(f"The streams differ in length: {ours.data.documents:,} and {theirs.data.documents:,} documents.")


def shared_samples(ours: Sequence[Sample], theirs: Sequence[Sample], a: Path, b: Path) -> list[Pair]:
    """Pairs the verdicts of A and of B on each question that both asked, in the order of A."""
    from mac_rag.errors import DataError

    by_id = {sample.id: sample for sample in theirs}
    pairs = []
    for sample in ours:
        other = by_id.get(sample.id)
        if other is None:
            continue
        if (sample.question, sample.answers) != (other.question, other.answers):
            raise DataError(
                f"the results are of different questions: {sample.id!r} is {sample.question!r} in {a}, "
                f"but {other.question!r} in {b}; were they drawn by the same --seed?"
            )
        pairs.append((sample.rows, other.rows))
    if not pairs:
        raise DataError(f"{a} and {b} have no question in common")
    return pairs


def _chosen_rows(
    pairs: Sequence[Pair], rows: Sequence[str], against: str | None, a: Path, b: Path
) -> list[tuple[str, str]]:
    """Selects the rows of A to compare, each with its row of B."""
    from mac_rag.errors import ConfigError

    names, others = ([name for name in pairs[0][side] if all(name in pair[side] for pair in pairs)] for side in (0, 1))
    selected = list(rows) or (names if against else [name for name in names if name in others])
    if not selected:
        raise ConfigError(f"no row has the same name in both; choose --row from {names} and --against from {others}")
    row_pairs = [(name, against or name) for name in selected]
    for name, other in row_pairs:
        if name not in names:
            raise ConfigError(f"{a} has no answers of row {name!r}; it has {names}")
        if other not in others:
            raise ConfigError(f"{b} has no answers of row {other!r}; it has {others}")
    return row_pairs


def compare(pairs: Sequence[Pair], rows: Sequence[tuple[str, str]], seed: int = 0) -> list[Difference]:
    """The figures of each pair of a row of A and a row of B, and their difference, A less B."""
    from eval.harness.bootstrap import paired_interval

    differences = []
    for name, other in rows:
        for figure in FIGURES:
            ours = [float(getattr(mine[name], figure)) for mine, _ in pairs]
            theirs = [float(getattr(yours[other], figure)) for _, yours in pairs]
            interval = paired_interval(ours, theirs, seed=seed)
            means = sum(ours) / len(ours), sum(theirs) / len(theirs)
            differences.append(Difference(name, other, figure, *means, interval))
    return differences


def _show(differences: Sequence[Difference]) -> None:
    from rich.table import Table

    table = Table()
    table.add_column("", overflow="fold")  # on a narrow terminal names take more lines, and no figure is cut
    for header in ("figure", "A", "B", "A - B (95 %)", ""):
        table.add_column(header, justify="left" if header == "figure" else "right", no_wrap=True)
    for entry in differences:
        interval, is_first = entry.interval, entry.figure == "em"
        if is_first:
            table.add_section()
        names = entry.row if entry.row == entry.against else f"{entry.row} / {entry.against}"
        table.add_row(
            cell(names if is_first else ""),
            FIGURES[entry.figure],
            f"{100 * entry.ours:.1f}",
            f"{100 * entry.theirs:.1f}",
            interval.percent,
            "*" if interval.low > 0 or interval.high < 0 else "",
        )
    show_table(table)


if __name__ == "__main__":
    run_command(main)
