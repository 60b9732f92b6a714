"""The table of a result: our figures, beside those of the paper (`published.json`) if it has the same row."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from eval.harness.results import Result, Row
from eval.report.catalogue import Experiment
from eval.report.figures import SCORES, column, figure, label, written
from mac_rag.config import Config

# Our names -> the names of the paper, if they differ; both normalised by `_plain`.
SAME = {
    "llama27bhf": "llama27b",
    "squadseq": "squad",
    "archivalqaseq": "archivalqa",
    "ptuning": "ptuningv2",
    "prefix": "ptuningv2",
    "lmalone": "zeroshot",
    "ccm+t5encoderretriever": "ccm+encoderretriever",
}


@dataclass(frozen=True)
class Cell:
    """A figure as text; `best` marks the best of its column, `paper` a figure of the paper."""

    text: str
    best: bool = False
    paper: bool = False


@dataclass(frozen=True)
class Table:
    """Headers and rows; the first cell of a row is its name."""

    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def table(result: Result, experiment: Experiment) -> Table:
    """The table of a result: every figure that any of its rows has, with the best scores marked."""
    rows = [row for row in result.rows if not experiment.drawn_only or experiment.drawn_only not in row.settings]
    paper: list[dict[str, float]] = [_published(result, row) for row in rows]
    columns: list[tuple[str, list[Cell]]] = []
    for name in dict.fromkeys([*SCORES, *(name for row in rows for name in row.measures)]):
        columns.append((label(name), _figures(rows, name)))
        columns.append(
            (f"paper {label(name)}", [Cell(written(name, figures.get(name)), paper=True) for figures in paper])
        )
    gains = [Cell(row.gain.f1.percent if row.gain else "–") for row in rows]
    columns.append(("F1 gained by the memory (95 %)", gains))
    shown = [(header, cells) for header, cells in columns if any(cell.text != "–" for cell in cells)]
    lines = zip([Cell(row.name) for row in rows], *(cells for _, cells in shown))
    return Table(("", *(header for header, _ in shown)), tuple(lines))


def paper_table(published: Published) -> Table:
    """One table of the paper, as printed there."""
    rows = (
        tuple(Cell(f"{value:g}" if isinstance(value, int | float) else value, paper=True) for value in row)
        for row in published.rows
    )
    return Table((*map(label, published.key), *map(label, published.figures)), tuple(rows))


def _published(result: Result, row: Row) -> dict[str, float]:
    figures: dict[str, float] = {}
    for published in published_of(result.experiment):
        figures |= published.of(result, row)
    return figures


def _figures(rows: Sequence[Row], name: str) -> list[Cell]:
    values = [figure(row, name) for row in rows]
    top = max((value for value in values if value is not None), default=0.0)
    best = top if name in ("em", "f1") and len(rows) > 1 and top > 0 else None
    texts = column(name, values)
    return [Cell(text, best=best is not None and value == best) for text, value in zip(texts, values)]


class Published(Config):
    """One table of the paper, or the figures of a plot that its text gives.

    Attributes:
        source: table or figure of the paper.
        experiment: name of the experiment, `eval.<experiment>`.
        key: names of the columns that identify a row.
        figures: names of the figures; em, f1 and shares are in percent.
        rows: rows of the values of the key, followed by the figures.
    """

    source: str
    experiment: str
    key: tuple[str, ...]
    figures: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]

    def of(self, result: Result, row: Row) -> dict[str, float]:
        """The paper's figures for our row, by name; empty if no row there has its data set, base LM and settings."""
        for published_row in self.rows:
            values, figures = published_row[: len(self.key)], published_row[len(self.key) :]
            if all(_plain(_ours(result, row, key)) == _plain(value) for key, value in zip(self.key, values)):
                return {name: float(figure) for name, figure in zip(self.figures, figures)}
        return {}


@cache
def published() -> tuple[Published, ...]:
    """All tables of the paper."""
    text = files("eval.report").joinpath("published.json").read_text(encoding="utf-8")
    return tuple(Published.parse(entry, "published.json") for entry in json.loads(text))


def published_of(experiment: str) -> list[Published]:
    """The tables of one experiment."""
    return [entry for entry in published() if entry.experiment == experiment]


def _ours(result: Result, row: Row, key: str) -> Any:
    if key in row.settings:
        return row.settings[key]
    if key == "dataset":
        return result.data.name if result.data else None
    if key == "model":
        if result.model is None:
            return None
        return (result.model.lm or str(result.model.config["base_lm"]["name"])).rsplit("/", 1)[-1]
    if key == "method":
        return row.name
    return getattr(row, key, None)


def _plain(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{float(value):g}"
    text = re.sub(r"[^a-z0-9+]", "", str(value).lower())
    return SAME.get(text, text)
