"""The figures that the paper prints, each with its table or figure there (`published.json`)."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from eval.harness.results import Result, Row
from mac_rag.config import Config

# Our names of what the paper calls otherwise, both normalised by `_plain`.
SAME = {
    "llama27bhf": "llama27b",
    "squadseq": "squad",
    "archivalqaseq": "archivalqa",
    "ptuning": "ptuningv2",
    "prefix": "ptuningv2",
    "lmalone": "zeroshot",
    "ccm+t5encoderretriever": "ccm+encoderretriever",
}


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
        return str(result.model.config["base_lm"]["name"]).rsplit("/", 1)[-1] if result.model else None
    if key == "method":
        return row.name
    return getattr(row, key, None)


def _plain(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{float(value):g}"
    text = re.sub(r"[^a-z0-9+]", "", str(value).lower())
    return SAME.get(text, text)
