"""Figures of the planner as PNG files: roofline, sensitivity, scaling, accuracy and gains."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.planner.step_time import Section
from sparse_dataflow.reporting.figures import png

# Colour-blind safe (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


def _legend(figure: Figure, axes: Axes, style: str, colours: Sequence[str], marks: Sequence[str]):
    """Draws a legend of names by colour, in a line style, and of names by marker."""
    handles = [
        axes.plot([], [], style, color=COLOURS[i], label=n)[0] for i, n in enumerate(colours)
    ]
    handles += [
        axes.plot([], [], MARKERS[i % len(MARKERS)], color="#777777", label=name)[0]
        for i, name in enumerate(marks)
    ]
    figure.legend(handles=handles, loc="outside right upper", fontsize=8)


def roofline(
    path: Path, chip: Chip, dtype: str, models: Mapping[str, Mapping[str, Section]], title: str
) -> None:
    """Plots the sections of several models on a chip's roofline.

    Args:
      path: PNG file to write.
      chip: chip with its FLOP rate and bandwidth.
      dtype: dtype of the matrix products.
      models: label -> section name -> `Section`, all with FLOPs.
      title: title of the figure.
    """
    names = list(dict.fromkeys(name for sections in models.values() for name in sections))
    peak, bandwidth = chip.rates(dtype)
    with png.figure(path, 7.2, 4.4, title) as (figure, grid):
        axes = grid[0][0]
        ends = [peak / bandwidth]
        for colour, sections in zip(COLOURS, models.values()):
            for name, s in sections.items():
                ends.append(float(s.intensity))
                axes.plot(
                    ends[-1],
                    float(s.flops / s.seconds) / 1e12,
                    MARKERS[names.index(name) % len(MARKERS)],
                    color=colour,
                    markersize=6,
                    alpha=0.85,
                    markeredgecolor="white",
                )
        x = np.geomspace(min(ends) / 4, max(ends) * 4, 200)
        axes.plot(x, np.minimum(peak, x * bandwidth) / 1e12, color="#444444", linewidth=1.2)
        axes.set(xscale="log", yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(_PLAIN)
        axes.set(xlabel="operational intensity, FLOP/byte", ylabel="TFLOP/s")
        _legend(figure, axes, "s", list(models), names)


def sensitivity(
    path: Path, effects: Mapping[str, float], best: Mapping[str, Mapping], title: str
) -> None:
    """Plots Shapley effects as bars, and the best throughput of each level of each choice.

    Args:
      path: PNG file to write.
      effects: choice -> share of the variance.
      best: choice -> level -> highest throughput.
      title: title of the figure.
    """
    names, height = list(effects), 0.42 * len(effects) + 1.3
    with png.figure(path, 9.6, height, title, columns=2, sharey=True, width_ratios=(1, 2)) as (
        _,
        [[left, right]],
    ):
        rows = np.arange(len(names))
        left.barh(rows, list(effects.values()), color=COLOURS[0], height=0.6)
        left.set_yticks(rows, [n.replace("_", "-") for n in names])
        left.invert_yaxis()
        left.set(xlabel="Shapley effect, share of variance")
        left.xaxis.set_major_formatter(PercentFormatter(1, 0))
        top = max(value for levels in best.values() for value in levels.values()) or 1.0
        for row, name in zip(rows, names):
            values = {level: value / top for level, value in best[name].items() if value > 0}
            for column, (level, value) in enumerate(values.items()):
                shade = matplotlib.colormaps["Blues"](0.75 * max(0.0, 2 * value - 1))
                right.barh(row, 0.96, left=column, height=0.8, color=shade)
                label = f"{level}".replace("interleaved/", "v=").replace("_", "\n")
                right.text(
                    column + 0.48, row, f"{label}\n{value:.2f}", ha="center", va="center",
                    fontsize=6.5, color="white" if value > 0.93 else "black",
                )  # fmt: skip
        right.set(xlabel="level, and its best throughput relative to the overall best")
        right.set_xticks([])
        right.grid(False)
        right.spines[["bottom", "left"]].set_visible(False)
        right.tick_params(left=False)


def scaling(
    path: Path,
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float, str]]]],
    ylabel: str,
    title: str,
) -> None:
    """Plots lines over the number of chips; markers show the limit of each point.

    Args:
      path: PNG file to write.
      panels: panel title -> line label -> (chips, value, limit) of each point.
      ylabel: label of the values.
      title: title of the figure.
    """
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    points = [point for lines in panels.values() for line in lines.values() for point in line]
    limits = list(dict.fromkeys(limit for _, _, limit in points))
    width, columns = 3.1 * len(panels) + 1.8, len(panels)
    with png.figure(path, width, 3.3, title, columns=columns, sharey=True) as (figure, [row]):
        for axes, (panel, lines) in zip(row, panels.items()):
            for label, line in lines.items():
                colour, (chips, values, _) = COLOURS[labels.index(label)], zip(*line)
                axes.plot(chips, values, color=colour, linewidth=1.2)
                for count, value, limit in line:
                    marker = MARKERS[limits.index(limit) % len(MARKERS)]
                    axes.plot(count, value, marker, color=colour, ms=5, markeredgecolor="white")
            axes.set(xscale="log", title=panel, xlabel="chips")
            axes.set_ylim(0, 1.08 * max(value for _, value, _ in points))
            ticks = sorted({count for line in lines.values() for count, _, _ in line})
            axes.set_xticks(ticks[::2], [f"{t:,}" for t in ticks[::2]])
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.tick_params(axis="x", labelsize=7)
        row[0].set(ylabel=ylabel)
        _legend(figure, row[0], "-", labels, limits)


def accuracy(
    path: Path, points: Mapping[str, Sequence[tuple[float, float, bool]]], title: str
) -> None:
    """Plots predicted against published step times on logarithmic axes.

    Args:
      path: PNG file to write.
      points: source -> (published seconds, predicted seconds, whether the row was fitted).
      title: title of the figure.
    """
    values = [value for rows in points.values() for row in rows for value in row[:2]]
    ends = np.array([min(values) / 1.5, max(values) * 1.5])
    with png.figure(path, 6.4, 4.6, title) as (_, [[axes]]):
        axes.fill_between(ends, ends * 0.9, ends * 1.1, color="#dddddd", linewidth=0)
        axes.plot(ends, ends, color="#666666", linewidth=0.8)
        for colour, marker, (source, rows) in zip(COLOURS, MARKERS, points.items()):
            for fitted in (False, True):
                subset = [row for row in rows if row[2] == fitted]
                axes.plot(
                    [published for published, _, _ in subset],
                    [predicted for _, predicted, _ in subset],
                    marker,
                    color=colour,
                    markerfacecolor="white" if fitted else colour,
                    markersize=5,
                    label=None if fitted else source,
                )
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        axes.set(xlabel="published, seconds per step", ylabel="predicted, seconds per step")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(_PLAIN)
        axes.legend(title="filled: held out; grey band: within 10%", fontsize=8)


def bars(
    path: Path,
    labels: Sequence[str],
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    ylabel: str,
    title: str,
) -> None:
    """Plots panels of grouped bars on one scale.

    Args:
      path: PNG file to write.
      labels: labels of the x axis.
      panels: panel title -> legend label -> value at each x label; all panels have the same legend.
      ylabel: label of the values.
      title: title of the figure.
    """
    columns = len(panels)
    with png.figure(path, 4.2 * columns, 3.6, title, columns=columns, sharey=True) as (_, [row]):
        for axes, (panel, groups) in zip(row, panels.items()):
            width = 0.84 / len(groups)
            for number, (name, values) in enumerate(groups.items()):
                x = np.arange(len(labels)) + (number - (len(groups) - 1) / 2) * width
                drawn = axes.bar(x, values, 0.92 * width, color=COLOURS[number], label=name)
                axes.bar_label(drawn, fmt="%.1f", fontsize=6.5)
            axes.set_xticks(range(len(labels)), labels)
            axes.grid(False, axis="x")
            axes.set(title=panel, xlabel="density (fraction of stored blocks)")
        row[0].set(ylabel=ylabel)
        row[0].legend(fontsize=7.5, loc="upper left")
