"""The names, values and formats of a row's figures, for tables, plots and findings alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

from eval.harness.results import Row

SCORES = {
    "em": "EM %",
    "f1": "F1 %",
    "em_prefix": "prefix %",
    "recall_at_k": "recall@k %",
    "f1_before_adaptation": "F1 % before adapting",
    "dates_f1": "F1 % gained by dates",
    "dates_f1_low": "... its interval from",
    "dates_f1_high": "... to",
}
NAMES = {
    "added": "documents added",
    "entries": "entries of the bank",
    "documents": "documents in the bank",
    "dataset": "data set",
    "retention": "F1 retained, %",
    "minutes": "time of adapting, min",
    "f1_kept": "F1 kept, %",
    "memory_kept": "memory kept, %",
    "peak_mb": "peak memory, MB",
    "K": "contexts K",
    "M": "size of subgroups M",
    "token": "memory token",
    "mass": "attention",
    "gold_mass": "attention to the gold document",
    "largest_distractor_mass": "attention to the strongest distractor",
    "gold_first": "gold document first",
}
UNITS = {"mb": "MB", "gb": "GB", "seconds": "s", "minutes": "min", "percent": "%", "ms": "ms", "bytes": "bytes"}


def figure(row: Row, name: str) -> float | None:
    """A figure of a row in its unit; None if the row does not have it.

    It is a score in percent, a measure, or a setting or field that is a number.
    """
    if name in SCORES:
        score = row.measures.get(name, getattr(row, name, None))
        return None if score is None else 100 * score
    for value in (row.measures.get(name), row.settings.get(name), getattr(row, name, None)):
        if isinstance(value, int | float):
            return float(value)
    return None


def label(name: str) -> str:
    """The label of a figure in tables and plots: "peak_mb" is "peak, MB"."""
    if name in SCORES or name in NAMES:
        return SCORES.get(name) or NAMES[name]
    words = name.split("_")
    if len(words) > 1 and words[-1] in UNITS:
        return f"{' '.join(words[:-1])}, {UNITS[words[-1]]}"
    return UNITS.get(name, name.replace("_", " "))


def written(name: str, value: float | None) -> str:
    """Formats a figure for a table; a dash for None."""
    if value is None:
        return "–"
    if name in SCORES:
        return f"{value:.1f}"
    if not isfinite(value):
        return "∞" if value > 0 else "undefined"
    if value.is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def column(name: str, values: Sequence[float | None]) -> list[str]:
    """Formats the figures of a column, with equally many decimals if they are of similar size."""
    known = [abs(value) for value in values if value is not None and isfinite(value)]
    sizes = [value for value in known if value]
    if name in SCORES or not sizes or max(sizes) / min(sizes) > 1000 or max(sizes) < 0.01:
        return [written(name, value) for value in values]
    whole = all(value.is_integer() for value in known)
    digits = 0 if whole or max(sizes) >= 1000 else 1 if max(sizes) >= 100 else 2 if max(sizes) >= 1 else 3
    return [
        f"{value:,.{digits}f}" if value is not None and isfinite(value) else written(name, value) for value in values
    ]


def with_figure(rows: Iterable[Row], *names: str) -> list[Row]:
    """Selects the rows that have all these figures."""
    return [row for row in rows if all(figure(row, name) is not None for name in names)]
