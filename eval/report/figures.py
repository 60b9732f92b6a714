"""How a row's figures are named, found and written, in tables, plots and findings alike."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite

from eval.results import Row

SCORES = {"em": "EM %", "f1": "F1 %", "em_prefix": "prefix %", "recall_at_k": "recall@k %"}
UNITS = {
    "mb": "MB",
    "gb": "GB",
    "seconds": "s",
    "minutes": "min",
    "percent": "%",
    "ms": "ms",
    "bytes": "bytes",
}


def figure(row: Row, name: str) -> float | None:
    """A figure of a row by its name: a score in percent, a measure, or a setting or count that is a number."""
    if name in SCORES:
        score = getattr(row, name)
        return None if score is None else 100 * float(score)
    for value in (row.measures.get(name), row.settings.get(name), getattr(row, name, None)):
        if isinstance(value, int | float):
            return float(value)
    return None


def label(name: str) -> str:
    """A figure's name for a reader: "peak_mb" is "peak, MB"."""
    if name in SCORES:
        return SCORES[name]
    words = name.split("_")
    if len(words) > 1 and words[-1] in UNITS:
        return f"{' '.join(words[:-1])}, {UNITS[words[-1]]}"
    return UNITS.get(name, name.replace("_", " "))


def written(name: str, value: float | None) -> str:
    """A figure for a table; a dash where there is none."""
    if value is None:
        return "–"
    if name in SCORES:
        return f"{value:.1f}"
    if not isfinite(value):
        return "∞" if value > 0 else "undefined"
    if value.is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def with_figure(rows: Iterable[Row], *names: str) -> list[Row]:
    """The rows that have all these figures."""
    return [row for row in rows if all(figure(row, name) is not None for name in names)]
