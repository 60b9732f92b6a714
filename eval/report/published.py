"""The figures that the paper prints, each with the table or figure it stands in (`published.json`)."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from eval.harness.results import Result, Row
from mac_rag.config import Config

# Names of the same thing here and in the paper, after `_plain`.
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
    """One table of the paper, or the figures that its text gives of a plot.

    Attributes:
        source: where they stand in the paper.
        key: what tells its rows apart.
        figures: names of the figures; em, f1 and shares in percent.
        rows: the values of the key, then the figures.
    """

    source: str
    experiment: str
    key: tuple[str, ...]
    figures: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]

    def of(self, result: Result, row: Row) -> dict[str, float]:
        """The paper's figures for a row of ours of the same data set, base LM and settings; none for any other."""
        for published in self.rows:
            theirs = published[: len(self.key)]
            if all(_plain(_ours(result, row, key)) == _plain(value) for key, value in zip(self.key, theirs)):
                return {name: float(value) for name, value in zip(self.figures, published[len(self.key) :])}
        return {}


@cache
def published() -> tuple[Published, ...]:
    """All of the paper's figures."""
    text = files("eval.report").joinpath("published.json").read_text(encoding="utf-8")
    return tuple(Published.parse(entry, "published.json") for entry in json.loads(text))


def published_of(experiment: str) -> list[Published]:
    """The paper's figures of one experiment."""
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
