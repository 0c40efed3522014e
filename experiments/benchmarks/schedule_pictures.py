"""Pictures of pipelines' tables as inline SVG (see svg.py): stages are rows, ticks columns."""

import itertools

import numpy as np
from markupsafe import Markup
from matplotlib.patches import Rectangle

from sparse_dataflow.pipeline.action_tables import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    WEIGHTS,
    Table,
)
from sparse_dataflow.reporting.figures import svg
from sparse_dataflow.reporting.figures.svg import COLOUR, TEXT

ACTIONS = {
    FORWARD: "forward",
    RECOMPUTE: "recomputation",
    BACKWARD: "input gradient",
    WEIGHTS: "weight gradients",
}
"""Action -> label; action i in this order has the colour --category<i>."""

MAX_TICKS = 1000
"""Maximum ticks of a picture; with more, cells would be narrower than a pixel."""

_ROW, _LABEL, _LEGEND, _TOP = 20, 58, 24, 4
_MIN_NUMBERED_CELL = 11
"""Minimum width of a cell with the micro-batch's number."""


def schedule_picture(table: Table, key: str) -> Markup:
    """Draws a table as a grid of stages by ticks with the micro-batch number in each cell.

    Later chunks of a stage are paler. Only the first `MAX_TICKS` ticks are drawn.

    Args:
      table: of a pipeline.
      key: prefix of the figure's ids, unique on the page.
    """
    ticks = min(table.ticks, MAX_TICKS)
    cell = min(18.0, max(1.0, 880 / ticks))
    width, body = _LABEL + ticks * cell + 6, _ROW * table.stages
    height = _TOP + body + _LEGEND + 8
    with svg.drawing(max(width, 430), height) as (figure, axes):
        for stage in range(table.stages):
            top = _TOP + stage * _ROW
            axes.text(0, top + _ROW / 2, f"stage {stage}", color=COLOUR["muted"], **TEXT)
            axes.add_patch(
                Rectangle((_LABEL, top + 1), ticks * cell, _ROW - 2, fc=COLOUR["well"], linewidth=0)
            )
        for stage, tick in itertools.product(range(table.stages), range(ticks)):
            action = int(table.action[stage, tick])
            if action not in ACTIONS:
                continue
            category = list(ACTIONS).index(action)
            left, top = _LABEL + tick * cell, _TOP + stage * _ROW
            chunk = int(table.chunk[stage, tick])
            alpha = 1 - 0.5 * chunk / table.chunks
            gap = 0.5 if cell >= 4 else 0.0
            corner, size = (left + gap, top + 1), (cell - 2 * gap, _ROW - 2)
            axes.add_patch(
                Rectangle(corner, *size, fc=COLOUR[f"category{category}"], alpha=alpha, linewidth=0)
            )
            if cell >= _MIN_NUMBERED_CELL:
                number = str(table.micro_batch[stage, tick] + 1)
                axes.text(left + cell / 2, top + _ROW / 2 + 0.5, number, ha="center", fontsize=9,
                          color=COLOUR[f"on-category{category}"], **TEXT)  # fmt: skip
        left, middle = _LABEL, _TOP + body + _LEGEND / 2 + 4
        for category, (action, name) in enumerate(ACTIONS.items()):
            if np.any(table.action == action):
                colour = COLOUR[f"category{category}"]
                axes.add_patch(Rectangle((left, middle - 5), 10, 10, fc=colour, linewidth=0))
                axes.text(left + 15, middle + 0.5, name, color=COLOUR["muted"], **TEXT)
                left += 30 + 6.2 * len(name)
        title = f"Schedule {table.name}: {table.stages} stages"
        return svg.inline(figure, key, title, describe(table))


def describe(table: Table) -> str:
    """Describes a table in one sentence."""
    chunks = f" of {table.chunks} chunks each" if table.chunks > 1 else ""
    return (
        f"{table.name}: {table.stages} stages{chunks}, {table.micro_batches} "
        f"micro-batches, {table.ticks} ticks, bubble {table.bubble():.1%}."
    )
