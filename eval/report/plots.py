"""Plots as inline SVG, with the colours and the typeface of the page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from eval.harness.results import Row
from eval.report.figures import column, figure, label, with_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Placeholders that `svg` replaces by the page's colours, so that plots are legible in its light and dark themes.
INK, RULE = "#010203", "#030201"
# Colours that colour-blind readers can distinguish. MAC always has the first.
MAC, OTHERS = "#c8553d", ("#2f6f8f", "#d9a441", "#5b8c5a", "#7a5c8e", "#8a8d91", "#3fa7a0", "#b0728a")
MARKERS = "osD^vPX*"
WIDTH = 7.4


@dataclass(frozen=True)
class Bars:
    """A bar chart, one group of horizontal bars for each row, one bar for each figure."""

    values: tuple[str, ...]
    caption: str

    def draw(self, rows: Sequence[Row], salt: str) -> str | None:
        values = tuple(name for name in self.values if with_figure(rows, name))
        rows = [row for row in rows if any(_drawable(row, name) for name in values)]
        if not rows or not values:
            return None
        drawing = _canvas(0.55 + (0.17 + 0.15 * len(values)) * len(rows))
        axes = drawing.subplots()
        height = 0.8 / len(values)
        for order, name in enumerate(values):
            places = [index + (order - (len(values) - 1) / 2) * height for index in range(len(rows))]
            widths = [_drawable(row, name) or 0.0 for row in rows]
            colours = [MAC if is_mac(row) else OTHERS[0] for row in rows]
            bars = axes.barh(places, widths, height * 0.92, color=colours, alpha=1.0 if order == 0 else 0.45)
            shown = ["" if text == "–" else text for text in column(name, [figure(row, name) for row in rows])]
            axes.bar_label(bars, shown, padding=3, fontsize=8, color=INK)
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_xlabel(" (solid) and ".join(map(label, values)) + (" (pale)" if len(values) > 1 else ""))
        _finish(axes, grid="x")
        return svg(drawing, salt)


@dataclass(frozen=True)
class Lines:
    """A line chart, one line for each group of rows.

    Attributes:
        x, y: names of the figures.
        group: the setting whose values make the lines; None for a single line.
        log_x: base of a logarithmic x axis; None for a linear one.
        log_y: True for a logarithmic y axis.
    """

    x: str
    y: str
    caption: str
    group: str | None = None
    log_x: int | None = None
    log_y: bool = False

    def draw(self, rows: Sequence[Row], salt: str) -> str | None:
        lines, level = self._points(rows)
        if not lines:
            return None
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

        drawing = _canvas(3.1)
        axes = drawing.subplots()
        if self.log_x:
            axes.set_xscale("log", base=self.log_x)
        if self.log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
            axes.yaxis.set_minor_locator(NullLocator())
        colours = palette(lines)
        for marker, (name, points) in zip(MARKERS * len(lines), lines.items()):
            points = sorted(points)
            axes.plot(
                [x for x, _ in points], [y for _, y in points], color=colours[name], marker=marker, label=name,
                linewidth=2.4 if colours[name] == MAC else 1.6, markersize=5,
            )  # fmt: skip
        for style, (name, height) in zip(("--", ":", "-.") * len(level), level.items()):
            axes.axhline(height, color=INK, alpha=0.55, linewidth=1.2, linestyle=style, label=name)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        if len(ticks) <= 8:
            axes.set_xticks(ticks, [f"{tick:,.6g}" for tick in ticks])
            axes.minorticks_off()
        axes.set_xlabel(label(self.x))
        axes.set_ylabel(label(self.y))
        if not self.log_y:
            low, high = axes.get_ylim()
            axes.set_ylim(min(0.0, low), high + 0.03 * (high - min(0.0, low)))
        _finish(axes, grid="both")
        if len(lines) + len(level) > 1:
            axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="center left", bbox_to_anchor=(1.0, 0.5))
        return svg(drawing, salt)

    def _points(self, rows: Iterable[Row]) -> tuple[dict[str, list[tuple[float, float]]], dict[str, float]]:
        """The points of each line, and the horizontal levels: the y of the rows without an x, by name."""
        lines: dict[str, list[tuple[float, float]]] = {}
        level: dict[str, float] = {}
        for row in rows:
            x, y = figure(row, self.x), _drawable(row, self.y)
            if y is None:
                continue
            if x is None:
                level[row.name] = y
            else:
                lines.setdefault(self._line(row), []).append((x, y))
        return lines, level

    def _line(self, row: Row) -> str:
        if self.group is None:
            return ""
        value = row.settings.get(self.group, row.name)
        # A value of a one-letter setting needs the letter: "p = 0.5".
        text = f"{value:g}" if isinstance(value, float) else str(value)
        return f"{self.group} = {text}" if len(self.group) == 1 else text


@dataclass(frozen=True)
class Heat:
    """Heat maps of a figure (`value`) over two settings (`x`, `y`), one map for each value of a third (`facet`)."""

    x: str
    y: str
    value: str
    facet: str
    caption: str

    def draw(self, rows: Sequence[Row], salt: str) -> str | None:
        rows = [row for row in with_figure(rows, self.value) if {self.x, self.y, self.facet} <= row.settings.keys()]
        facets = list(dict.fromkeys(row.settings[self.facet] for row in rows))
        if not facets:
            return None
        drawing = _canvas(3.2)
        axes: Any = drawing.subplots(1, len(facets), squeeze=False)[0]
        top = max(figure(row, self.value) or 0.0 for row in rows)
        image: Any = None
        for panel, facet in zip(axes, facets):
            shown = [row for row in rows if row.settings[self.facet] == facet]
            columns = list(dict.fromkeys(row.settings[self.x] for row in shown))
            lines = list(dict.fromkeys(row.settings[self.y] for row in shown))
            cells = {(row.settings[self.y], row.settings[self.x]): figure(row, self.value) for row in shown}
            grid = [[cells.get((line, column)) or 0.0 for column in columns] for line in lines]
            image = panel.imshow(grid, cmap="OrRd", vmin=0.0, vmax=top, aspect="auto", interpolation="nearest")
            panel.set_title(f"{facet} {self.facet}", fontsize=9, color=INK)
            panel.set_xticks(range(len(columns)), list(map(str, columns)), rotation=30, ha="right")
            step = max(1, len(lines) // 12)
            panel.set_yticks(range(0, len(lines), step), list(map(str, lines[::step])))
            panel.set_ylabel(label(self.y))
            _finish(panel, grid=None)
        scale = drawing.colorbar(image, ax=list(axes), shrink=0.9, label=label(self.value))
        scale.outline.set_visible(False)
        scale.ax.tick_params(length=0, colors=INK, labelsize=8)
        scale.ax.yaxis.label.set_color(INK)
        return svg(drawing, salt)


Plot = Bars | Lines | Heat


def is_mac(row: Row) -> bool:
    """True if a row is measured with memory."""
    return "MAC" in f"{row.settings.get('method', row.name)}".replace("no MAC", "").split()


def palette(names: Iterable[str]) -> dict[str, str]:
    """Gives each line a colour: MAC always has its own, the others take theirs in order."""
    names = list(names)
    others = [name for name in names if name.split()[:1] != ["MAC"]]
    colours = {name: OTHERS[index % len(OTHERS)] for index, name in enumerate(others)}
    return {name: colours.get(name, MAC) for name in names}


def _drawable(row: Row, name: str) -> float | None:
    value = figure(row, name)
    return value if value is not None and isfinite(value) else None


def _canvas(height: float) -> Figure:
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing

    with rc_context({"font.size": 9}):
        drawing = Drawing(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasAgg(drawing)
        return drawing


def _finish(axes: Any, grid: str | None) -> None:
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.tick_params(length=0, colors=INK, labelsize=8.5)
    axes.xaxis.label.set(color=INK, fontsize=8.5)
    axes.yaxis.label.set(color=INK, fontsize=8.5)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, color=RULE, linewidth=0.8)


def svg(drawing: Figure, salt: str) -> str:
    """Makes a drawing an `<svg>` element; `salt` makes its ids differ from those of other drawings on the page."""
    from matplotlib import rc_context
    from matplotlib.text import Text

    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    for text in drawing.findobj(Text):
        text.set_parse_math(False)  # a name with dollar signs is no formula
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "text.parse_math": False}):
        drawing.savefig(file, format="svg", transparent=True, metadata=nothing)
    xml = file.getvalue()
    xml = xml[xml.index("<svg") :]
    xml = re.sub(r"<metadata>.*?</metadata>", "", xml, flags=re.DOTALL)
    xml = re.sub(r' (width|height)="[\d.]+pt"', "", xml, count=2)
    xml = re.sub(r' id="(?:[A-Za-z0-9.]+_\d+|image[0-9a-f]+)"', "", xml)
    xml = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", xml)
    return xml.replace(INK, "var(--ink)").replace(RULE, "var(--rule)").strip()
