"""The plots of `benchmarks.memory_vs_accuracy`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from eval.harness.aggregation_methods import Measurement

_Value = Callable[["Measurement"], float]


def plot(rows: Sequence[Measurement], path: Path) -> list[Path]:
    """Draws one PNG for each group of rows beside the JSON file `path`, and returns their paths."""
    drawn = []
    for group, draw in {"hierarchical": _hierarchical, "reduction": _reduction}.items():
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.subplots(1, 2), rows)
        drawn.append(path.with_name(f"{path.stem}-{group}.png"))
        figure.savefig(drawn[-1], dpi=150)
    return drawn


def _parameter(row: Measurement) -> float:
    return row.parameter or 0


def _f1(row: Measurement) -> float:
    return 100 * row.f1


def _em(row: Measurement) -> float:
    return 100 * row.em


def _peak(row: Measurement) -> float:
    return row.peak_bytes / 1e6


def _of(rows: Sequence[Measurement], group: str) -> tuple[list[Measurement], list[Measurement]]:
    """The rows of a group: first those with a parameter, then those without."""
    group_rows = [row for row in rows if row.group == group]
    return [row for row in group_rows if row.parameter is not None], [row for row in group_rows if not row.parameter]


def _hierarchical(axes: Any, rows: Sequence[Measurement]) -> None:
    """Figure 5 of the paper: F1 and peak memory by subgroup size M."""
    sized, whole = _of(rows, "hierarchical")
    axes[1].set_yscale("log")
    for axis, label, value in ((axes[0], "F1 %", _f1), (axes[1], "peak memory of aggregation, MB", _peak)):
        axis.set_xscale("log", base=2)
        _line(axis, sized, _parameter, value, "hierarchical")
        for style, row in zip(("--", ":"), whole):
            axis.axhline(value(row), color="gray", linestyle=style, label=row.name)
        _finish(axis, "subgroup size M", label)


def _reduction(axes: Any, rows: Sequence[Measurement]) -> None:
    """Figure 7 of the paper: F1 and EM by the number of entries in the bank."""
    reduced = _of(rows, "reduction")[0]
    whole = next(row for row in rows if row.method == "streaming")
    for axis, label, value in ((axes[0], "F1 %", _f1), (axes[1], "EM %", _em)):
        for method in dict.fromkeys(row.method for row in reduced):
            _line(axis, [row for row in reduced if row.method == method], _parameter, value, method)
        axis.plot([whole.entries], [value(whole)], "k*", markersize=10, label="whole bank")
        _finish(axis, "entries of the bank", label)


def _line(axis: Axes, rows: Sequence[Measurement], x: _Value, y: _Value, label: str) -> None:
    axis.plot([x(row) for row in rows], [y(row) for row in rows], "o-", label=label)


def _finish(axis: Axes, x: str, y: str) -> None:
    axis.set(xlabel=x, ylabel=y)
    if axis.get_yscale() == "linear":
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
