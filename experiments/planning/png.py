"""Figures of studies and of the planner as PNG files."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sparse_dataflow.reporting.figures.svg import Style

STYLE: Style = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.titlesize": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.dpi": 150,
    "figure.titlesize": 10,
}


@contextlib.contextmanager
def figure(
    path: Path, width: float, height: float, title: str = "", rows: int = 1, columns: int = 1,
    **options,
) -> Iterator[tuple[Figure, np.ndarray]]:  # fmt: skip
    """Yields a new figure and its axes [rows, columns], and writes the figure at the end.

    Args:
      path: PNG file to write; its folder is made.
      width: in inches.
      height: in inches.
      options: see `Figure.subplots`.
    """
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(drawn)
        yield drawn, drawn.subplots(rows, columns, squeeze=False, **options)
        drawn.suptitle(title)
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(path, format="png", metadata={"Software": None})
