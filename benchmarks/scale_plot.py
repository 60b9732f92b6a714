"""The plot of `benchmarks.scale`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

_LINES = {
    "later s": ("a question", "o-"),
    "first s": ("the first question after opening", "o--"),
    "opening s": ("opening the bank", "^:"),
    "all rows s": ("all rows, without bounds", "s-"),
    "published s": ("published way", "x-"),
}


def draw(banks: Sequence[Mapping[str, float]], path: Path) -> Path:
    """Draws seconds against the number of documents as SVG, and returns its path."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for name, (label, style) in _LINES.items():
        known = [(each["documents"], each[name]) for each in banks if name in each]
        if known:
            axes.plot(*zip(*known, strict=True), style, label=label)
    axes.set(xscale="log", yscale="log", xlabel="documents in the bank", ylabel="seconds")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    return path
