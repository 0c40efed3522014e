"""The planner's figures, as files that stand alone: roofline, sensitivity, scaling, truth."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.planning.step_time import Section
from sparse_dataflow.reporting.svg import Style

STYLE: Style = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.dpi": 150,
}
# Colour-blind safe (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"


def new(width: float, height: float, columns: int = 1, rows: int = 1, **options):
    """A figure of inches with its axes, drawn by `save`; call under `style()`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def style():
    """The settings under which a figure is made and saved."""
    return matplotlib.rc_context(STYLE)


def save(figure: Figure, path: Path) -> Path:
    """Writes the figure as PNG; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Software": None})
    return path


def roofline(
    chip: Chip, dtype: str, models: Mapping[str, Mapping[str, Section]], title: str
) -> Figure:
    """The chip's roofline with the sections of several models on it.

    Args:
      chip: with its rate and bandwidth.
      dtype: of the products.
      models: label -> section name -> `Section`; sections without FLOPs are left out.
      title: above the figure.
    """
    with style():
        figure, grid = new(7.2, 4.4)
        axes = grid[0][0]
        peak, bandwidth = chip.rates(dtype)
        points = [
            s for sections in models.values() for s in sections.values() if float(s.flops) > 0
        ]
        found = [float(s.intensity) for s in points]
        low, high = min(*found, peak / bandwidth) / 4, max(*found, peak / bandwidth) * 4
        x = np.geomspace(low, high, 200)
        axes.plot(x, np.minimum(peak, x * bandwidth) / 1e12, color="#444444", linewidth=1.2)
        names = list(dict.fromkeys(n for sections in models.values() for n in sections))
        for number, sections in enumerate(models.values()):
            for name, s in sections.items():
                if float(s.flops) > 0:
                    axes.plot(
                        float(s.intensity),
                        float(s.flops / s.seconds) / 1e12,
                        MARKERS[names.index(name) % len(MARKERS)],
                        color=COLOURS[number],
                        markersize=6,
                        alpha=0.85,
                        markeredgecolor="white",
                    )
        axes.set(xscale="log", yscale="log")
        figure.suptitle(title, fontsize=10)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel="operational intensity, FLOP a byte", ylabel="TFLOP/s")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        shown = [name for name in names if any(float(m[name].flops) > 0 for m in models.values())]
        handles = [
            axes.plot([], [], "s", color=COLOURS[i], label=label)[0]
            for i, label in enumerate(models)
        ]
        handles += [
            axes.plot([], [], MARKERS[names.index(n) % len(MARKERS)], color="#777777", label=n)[0]
            for n in shown
        ]
        figure.legend(handles=handles, loc="outside right upper", fontsize=8)
        return figure


def sensitivity(effects: Mapping[str, float], best: Mapping[str, Mapping], title: str) -> Figure:
    """Shapley effects as bars; beside them, the best throughput that each level leaves.

    Args:
      effects: choice -> share of the variance.
      best: choice -> level -> highest throughput.
      title: above the figure.
    """
    with style():
        figure, grid = new(
            9.6, 0.42 * len(effects) + 1.3, columns=2, sharey=True, width_ratios=(1, 2)
        )
        left, right = grid[0]
        names = list(effects)
        rows = np.arange(len(names))
        left.barh(rows, [effects[n] for n in names], color=COLOURS[0], height=0.6)
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
        right.set(xlabel="level, and the best throughput with it as a fraction of the best of all")
        right.set_xticks([])
        right.grid(False)
        right.spines[["bottom", "left"]].set_visible(False)
        right.tick_params(left=False)
        figure.suptitle(title, fontsize=10)
        return figure


def scaling(
    panels: Mapping[str, Mapping[str, Sequence[tuple[int, float, str]]]], ylabel: str, title: str
) -> Figure:
    """Lines over numbers of chips, a panel each, with what limits each point in its marker.

    Args:
      panels: panel title -> line label -> (chips, value, what limits) of each point.
      ylabel: of the values.
      title: above the figure.
    """
    with style():
        figure, grid = new(3.1 * len(panels) + 1.8, 3.3, columns=len(panels), sharey=True)
        limits = list(
            dict.fromkeys(p[2] for lines in panels.values() for ps in lines.values() for p in ps)
        )
        labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
        highest = max(p[1] for lines in panels.values() for ps in lines.values() for p in ps)
        for axes, (panel, lines) in zip(grid[0], panels.items()):
            for label, points in lines.items():
                colour = COLOURS[labels.index(label)]
                axes.plot(
                    [p[0] for p in points], [p[1] for p in points], color=colour, linewidth=1.2
                )
                for chips, value, limit in points:
                    marker = MARKERS[limits.index(limit) % len(MARKERS)]
                    axes.plot(chips, value, marker, color=colour, ms=5, markeredgecolor="white")
            axes.set(xscale="log", title=panel, xlabel="chips")
            axes.set_ylim(0, 1.08 * highest)
            ticks = sorted({p[0] for points in lines.values() for p in points})
            axes.set_xticks(ticks[::2], [f"{t:,}" for t in ticks[::2]])
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.tick_params(axis="x", labelsize=7)
        grid[0][0].set(ylabel=ylabel)
        handles = [
            grid[0][0].plot([], [], color=COLOURS[i], label=n)[0] for i, n in enumerate(labels)
        ]
        handles += [
            grid[0][0].plot([], [], MARKERS[i % len(MARKERS)], color="#777777", label=n)[0]
            for i, n in enumerate(limits)
        ]
        figure.legend(handles=handles, loc="outside right upper", fontsize=8)
        figure.suptitle(title, fontsize=10)
        return figure


def truth(points: Mapping[str, Sequence[tuple[float, float, bool]]], title: str) -> Figure:
    """Predicted against published seconds, both axes logarithmic.

    Args:
      points: source -> (published, predicted, whether the row was fitted).
      title: above the figure.
    """
    with style():
        figure, grid = new(6.4, 4.6)
        axes = grid[0][0]
        values = [v for rows in points.values() for row in rows for v in row[:2]]
        ends = np.array([min(values) / 1.5, max(values) * 1.5])
        axes.fill_between(ends, ends * 0.9, ends * 1.1, color="#dddddd", linewidth=0)
        axes.plot(ends, ends, color="#666666", linewidth=0.8)
        for number, (source, rows) in enumerate(points.items()):
            for fitted in (False, True):
                chosen = [row for row in rows if row[2] == fitted]
                axes.plot(
                    [row[0] for row in chosen],
                    [row[1] for row in chosen],
                    MARKERS[number],
                    color=COLOURS[number],
                    markerfacecolor="white" if fitted else COLOURS[number],
                    markersize=5,
                    label=None if fitted else source,
                )
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=title)
        axes.set(xlabel="published, seconds a step", ylabel="predicted, seconds a step")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axes.legend(title="filled: held out; grey: within 10%", fontsize=8)
        return figure


def bars(
    labels: Sequence[str],
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    ylabel: str,
    title: str,
) -> Figure:
    """Panels of grouped bars on one scale, one bar of each group at each label.

    Args:
      labels: along each x axis.
      panels: title -> legend -> a value for each label; all have the same legends.
      ylabel: of the values.
      title: above the figure.
    """
    with style():
        figure, grid = new(4.2 * len(panels), 3.6, columns=len(panels), sharey=True)
        for axes, (panel, groups) in zip(grid[0], panels.items()):
            width = 0.84 / len(groups)
            for number, (name, values) in enumerate(groups.items()):
                x = np.arange(len(labels)) + (number - (len(groups) - 1) / 2) * width
                axes.bar(x, values, 0.92 * width, color=COLOURS[number], label=name)
                for at, value in zip(x, values):
                    axes.text(at, value, f"{value:.1f}", ha="center", va="bottom", fontsize=6.5)
            axes.set_xticks(range(len(labels)), labels)
            axes.grid(False, axis="x")
            axes.set_title(panel, fontsize=9)
            axes.set(xlabel="fraction of the blocks that are stored")
        grid[0][0].set(ylabel=ylabel)
        grid[0][0].legend(fontsize=7.5, loc="upper left")
        figure.suptitle(title, fontsize=10)
        return figure
