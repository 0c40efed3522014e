"""Figures of the planner as PNG files: roofline and sensitivity."""

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
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


def legend(figure: Figure, axes: Axes, style: str, colours: Sequence[str], marks: Sequence[str]):
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
        axes.yaxis.set_major_formatter(PLAIN)
        axes.set(xlabel="operational intensity, FLOP/byte", ylabel="TFLOP/s")
        legend(figure, axes, "s", list(models), names)


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
