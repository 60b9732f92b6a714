"""The rows of a result as tables on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.table import Table

from eval.harness.bootstrap import Interval
from eval.harness.results import BY_DATES, Row
from mac_rag.cli.terminal import cell, show_table


def show(rows: Sequence[Row], *, title: str) -> None:
    """Prints the rows as a table; a column is left out if no row has its figure."""
    _show(_columns(rows), rows, title)


def show_further(rows: Sequence[Row]) -> None:
    """Prints the scores that do not fit into the table of `show`, if any row has one."""
    columns = _filled(
        {
            "substring %": [_percent(row.substring) for row in rows],
            "MRR@k %": [_percent(row.mrr_at_k) for row in rows],
            "nDCG@k %": [_percent(row.ndcg_at_k) for row in rows],
        }
    )
    if columns:
        _show(columns, rows, "Further figures")


def _show(columns: Mapping[str, Sequence[str]], rows: Sequence[Row], title: str) -> None:
    table = Table(title=cell(title), title_justify="left")
    table.add_column("", no_wrap=True)
    for header in columns:
        table.add_column(header, justify="right", overflow="fold")
    for index, row in enumerate(rows):
        table.add_row(cell(row.name), *(cells[index] for cells in columns.values()))
    # Without a terminal the width is unknown, and the default of 80 columns would break figures.
    show_table(table, width=None if sys.stdout.isatty() else 160)


def _columns(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The cells of each column by its header; "-" for a figure that a row does not have."""
    measures = [name for name in dict.fromkeys(name for row in rows for name in row.measures) if name not in BY_DATES]
    return _filled(
        {
            "EM %": [_percent(row.em) for row in rows],
            "F1 %": [_percent(row.f1) for row in rows],
            "prefix %": [_percent(row.em_prefix) for row in rows],
            "recall@k %": [_percent(row.recall_at_k) for row in rows],
            "+EM (95 %)": [_gain(row.gain.em if row.gain else None) for row in rows],
            "+F1 (95 %)": [_gain(row.gain.f1 if row.gain else None) for row in rows],
            "+F1 by dates (95 %)": [_gain(_by_dates(row)) for row in rows],
            **{
                name: [f"{row.measures[name]:,.4g}" if name in row.measures else "-" for row in rows]
                for name in measures
            },
            "truncated": ["-" if row.truncated is None else f"{row.truncated:,}" for row in rows],
            "q/s": [f"{row.questions / row.seconds:,.1f}" if row.questions and row.seconds else "-" for row in rows],
        }
    )


def _filled(columns: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {header: cells for header, cells in columns.items() if set(cells) - {"-"}}


def _by_dates(row: Row) -> Interval | None:
    figures = [row.measures.get(name) for name in BY_DATES]
    return Interval.model_validate(dict(zip(("mean", "low", "high"), figures))) if None not in figures else None


def _percent(figure: float | None) -> str:
    return "-" if figure is None else f"{100 * figure:.1f}"


def _gain(gain: Interval | None) -> str:
    return "-" if gain is None else gain.percent
