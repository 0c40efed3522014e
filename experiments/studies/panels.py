"""Figures of studies: panels of curves or samples."""

import dataclasses
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from ..planning import png

Values = Sequence[float] | np.ndarray

_COLUMNS = 4
_INCHES = 3.3
_TITLE_CHARACTERS = 40
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")

_HANDLE, _LETTER = 0.6, 0.09
"""Inches of a legend's handle and of a letter of its names."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """Points of one curve.

    Attributes:
      x: float [n].
      y: float [n].
      low: float [n], lower end of the spread; empty for none.
      high: float [n], upper end of the spread; empty for none.
      joined: whether to connect the points by a line.
      marked: whether to draw markers.
      dashed: whether the line is dashed, e.g. for predictions and references.
      bars: whether the spread is drawn as bars instead of a band.
    """

    x: Values
    y: Values
    low: Values = ()
    high: Values = ()
    joined: bool = True
    marked: bool = True
    dashed: bool = False
    bars: bool = False


@dataclasses.dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
      title: title of the axes.
      x_label: label of x with its unit.
      y_label: label of y with its unit.
      curves: name -> curve; a name has the same colour in all panels.
      log_x: base of a logarithmic x axis; 0 for a linear axis.
      log_y: whether the y axis is logarithmic.
      ticks: x ticks; empty for matplotlib's default.
      limits: lower and upper limit of y; empty for matplotlib's default.
    """

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, Curve]
    log_x: int = 0
    log_y: bool = False
    ticks: Sequence[float] = ()
    limits: Sequence[float] = ()


def save_panels(path: Path, panels: Sequence[Panel], title: str = "") -> None:
    """Draws the panels side by side, at most four per row.

    All panels share a legend, unless no two panels have a curve name in common: then each panel
    has its own legend.
    """
    columns = min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    separate = len(panels) > 1 and len(names) == sum(len(panel.curves) for panel in panels)
    size = _INCHES * columns, _INCHES * rows + 0.5
    with png.figure(path, *size, title, rows, columns) as (figure, grid):
        for axes, panel in zip(grid.flat, panels):
            _draw(axes, panel, list(panel.curves) if separate else names)
            if separate:
                axes.legend(fontsize=8)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        if not separate:
            handles: dict[str, Artist] = {}
            for axes in grid.flat:
                for handle, name in zip(*axes.get_legend_handles_labels()):
                    handles.setdefault(name, handle)
            fitting = int(size[0] / (_HANDLE + _LETTER * max(map(len, names), default=0)))
            figure.legend(
                [handles[name] for name in names],
                names,
                loc="outside lower center",
                ncols=max(1, min(4, fitting)),
            )


def _draw(axes: Axes, panel: Panel, names: Sequence[str]) -> None:
    for name, curve in panel.curves.items():
        colour = f"C{names.index(name) % 10}"
        line = "none" if not curve.joined else "--" if curve.dashed else "-"
        marker = "o" if curve.marked else "none"
        axes.plot(curve.x, curve.y, label=name, ls=line, marker=marker, color=colour, markersize=4)
        if curve.bars:
            axes.vlines(curve.x, curve.low, curve.high, color=colour, linewidth=1.2)
        elif len(curve.low):
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
    title = textwrap.fill(panel.title, _TITLE_CHARACTERS)
    axes.set(title=title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.log_x:
        axes.set_xscale("log", base=panel.log_x)
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(_PLAIN)
        axes.yaxis.set_minor_locator(NullLocator())
    if len(panel.ticks):
        axes.xaxis.set_major_locator(FixedLocator(list(panel.ticks)))
        axes.xaxis.set_major_formatter(_PLAIN)
        axes.xaxis.set_minor_locator(NullLocator())
    if len(panel.limits):
        axes.set_ylim(*panel.limits)


def save_strips(
    path: Path, groups: Mapping[str, Mapping[str, Sequence[float]]], label: str, reference: str = ""
) -> None:
    """Draws one panel per group with one row per name: samples as dots, means as strokes.

    Rows are sorted by their mean, the lowest on top.

    Args:
      path: PNG file to write.
      groups: {panel title: {name: samples}}.
      label: label of the values with their unit; the axis need not include 0.
      reference: name whose mean is drawn as a line across its panel.
    """
    longest = max(len(rows) for rows in groups.values())
    size = _INCHES * 1.25 * len(groups), 0.3 * longest + 1.2
    with png.figure(path, *size, columns=len(groups)) as (_, grid):
        for axes, (title, rows) in zip(grid[0], groups.items()):
            order = sorted(rows, key=lambda name: np.mean(rows[name]), reverse=True)
            for row, name in enumerate(order):
                colour = "0.35" if name == reference else "C0"
                mean = float(np.mean(rows[name]))
                axes.plot([mean, mean], [row - 0.35, row + 0.35], color=colour, linewidth=3)
                axes.plot(rows[name], [row] * len(rows[name]), "k.", markersize=4)
            if reference in rows:
                axes.axvline(np.mean(rows[reference]), color="0.35", linestyle="--", linewidth=1)
            axes.set_yticks(range(len(order)), order, fontsize=8)
            axes.grid(False, axis="x")
            axes.set(xlabel=label, title=title)
