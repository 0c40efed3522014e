"""Colours, a legend and a roofline for figures of the planner as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.planner.step_time import Section

from . import png

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
