"""Figures of layouts that change: the blocks now, against those before, and the share exchanged."""

import functools
import math
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator, PercentFormatter

from sparse_dataflow.core.config.projections import PROJECTIONS
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.reporting.figures import drawings, svg
from sparse_dataflow.reporting.figures.svg import COLOUR

MOST_CELLS = 64
"""Cells on a side of a picture; a larger layout has several blocks in a cell."""

KEPT, NEW, DROPPED = "sparse", "category4", "rule"
"""Colours of blocks that are stored now and before, now alone, and before alone."""

_SHADES = 4
_WIDTH = 256
_LARGEST_CELL = 8.0


def cell_side(layout: BlockLayout) -> int:
    """Returns how many blocks the side of a cell in the layout's picture has."""
    return math.ceil(max(layout.mask.shape) / MOST_CELLS)


@functools.lru_cache(maxsize=256)
@svg.drawn
def layout_picture(layout: BlockLayout, before: BlockLayout | None, key: str, title: str) -> Markup:
    """Draws the stored blocks of a layout.

    A cell of several blocks is the darker the more of them are stored, and has the colour of new
    blocks where most of its stored ones are new.

    Args:
      before: an earlier layout of the same grid, which says which blocks are new; None if unknown.
      key: prefix of the figure's ids, unique on the page.
      title: accessible title of the figure.
    """
    side, mask = cell_side(layout), layout.mask
    old = mask if before is None else before.mask
    shares = _cell_means(mask, side)
    is_new = _cell_means(mask & ~old, side) > shares / 2
    shades = np.ceil(_SHADES * shares / shares.max())
    filled = [(DROPPED, 1.0, np.argwhere(old & ~mask).tolist())] if side == 1 else []
    for colour, chosen in ((KEPT, ~is_new), (NEW, is_new)):
        for shade in range(1, _SHADES + 1):
            cells = np.argwhere(chosen & (shades == shade)).tolist()
            filled.append((colour, shade / _SHADES, cells))
    cell = min(_LARGEST_CELL, _WIDTH / max(shares.shape))
    description = f"{layout.nnz} of {mask.size} blocks are stored."
    if before is not None:
        description += f" {np.count_nonzero(mask & ~old)} of them are new."
    rows, columns = shares.shape
    return drawings.block_picture(rows, columns, filled, cell, key, title, description)


def _cell_means(mask, side):
    """Returns the mean of each cell of side x side entries; cells at the end may have fewer."""
    starts = [range(0, length, side) for length in mask.shape]
    sums = np.add.reduceat(np.add.reduceat(mask.astype(float), starts[0], 0), starts[1], 1)
    sizes = [np.minimum(side, length - np.array(s)) for length, s in zip(mask.shape, starts)]
    return sums / np.multiply.outer(*sizes)


@svg.drawn
def exchange_curves(history: Sequence[Mapping[str, object]], key: str) -> Markup | None:
    """Plots the share of blocks that each layout update exchanged, by projection.

    Args:
      history: metrics rows of a variant.
      key: prefix of the figure's ids, unique on the page.

    Returns:
      The SVG; None where no update exchanged blocks.
    """
    every = {
        name: drawings.series(history, "evolution", "step", f"changed/{name}")
        for name in PROJECTIONS
    }
    lines = {name: line for name, line in every.items() if len(line)}
    if not lines:
        return None
    with matplotlib.rc_context(svg.STYLE):
        figure = svg.new_figure(drawings.WIDTH, 180)
        axes = figure.add_axes((0.145, 0.24, 0.735, 0.7))
        for number, (name, line) in enumerate(lines.items()):
            colour, points = COLOUR[f"category{number}"], drawings.subsample(line)
            axes.plot(points[:, 0], points[:, 1], ".-", color=colour, linewidth=1.5, label=name)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set(xlabel="step", ylabel="exchanged blocks")
        axes.spines["right"].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.legend(loc="upper right", frameon=False, fontsize=9)
        ends = [f"{name}: last {line[-1, 1]:.1%}" for name, line in lines.items()]
        title = "Share of blocks exchanged at each layout update"
        return svg.inline(figure, key, title, "; ".join(ends) + ".")
