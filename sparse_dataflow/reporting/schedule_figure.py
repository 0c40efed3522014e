"""The picture of a pipeline schedule: stages down, ticks across, inline SVG (see svg.py)."""

import itertools
from collections.abc import Sequence

import jinja2
import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.patches import Rectangle

from sparse_dataflow.parallel.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    WEIGHTS,
    Schedule,
)
from sparse_dataflow.reporting import svg
from sparse_dataflow.reporting.svg import COLOUR, TEXT

ACTIONS = {
    FORWARD: "forward",
    RECOMPUTE: "recomputation",
    BACKWARD: "input gradient",
    WEIGHTS: "weight gradients",
}
"""Action -> what it is called; number i in this order has the colour --part<i>."""

LONGEST = 1000
"""Ticks in a picture at most: past it cells would be thinner than a pixel."""

_ROW, _LABEL, _LEGEND, _TOP = 20, 58, 24, 4
_NUMBERED = 11
"""Width of the narrowest cell that has room for a micro-batch's number."""


def schedule_picture(schedule: Schedule, key: str) -> Markup:
    """A schedule as a grid: a row a stage, a column a tick, the micro-batch's number in each cell.

    Chunks after a stage's first are drawn paler; of a long schedule only the beginning is drawn.

    Args:
      schedule: the table.
      key: prefix of the figure's ids, unique on the page.
    """
    ticks = min(schedule.ticks, LONGEST)
    cell = min(18.0, max(1.0, 880 / ticks))
    width, body = _LABEL + ticks * cell + 6, _ROW * schedule.stages
    height = _TOP + body + _LEGEND + 8
    with matplotlib.rc_context(svg.STYLE):
        figure = svg.figure(max(width, 430), height)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, max(width, 430)), ylim=(height, 0))
        axes.set_axis_off()
        for stage in range(schedule.stages):
            top = _TOP + stage * _ROW
            axes.text(0, top + _ROW / 2, f"stage {stage}", color=COLOUR["muted"], **TEXT)
            axes.add_patch(
                Rectangle((_LABEL, top + 1), ticks * cell, _ROW - 2, fc=COLOUR["well"], linewidth=0)
            )
        for stage, tick in itertools.product(range(schedule.stages), range(ticks)):
            action = int(schedule.action[stage, tick])
            if action not in ACTIONS:
                continue
            part = list(ACTIONS).index(action)
            left, top = _LABEL + tick * cell, _TOP + stage * _ROW
            chunk = int(schedule.chunk[stage, tick])
            paler = 1 - 0.5 * chunk / schedule.chunks
            gap = 0.5 if cell >= 4 else 0.0
            corner, size = (left + gap, top + 1), (cell - 2 * gap, _ROW - 2)
            axes.add_patch(
                Rectangle(corner, *size, fc=COLOUR[f"part{part}"], alpha=paler, linewidth=0)
            )
            if cell >= _NUMBERED:
                number = str(schedule.micro_batch[stage, tick] + 1)
                axes.text(left + cell / 2, top + _ROW / 2 + 0.5, number, ha="center", fontsize=9,
                          color=COLOUR[f"on-part{part}"], **TEXT)  # fmt: skip
        left, middle = _LABEL, _TOP + body + _LEGEND / 2 + 4
        for part, (action, name) in enumerate(ACTIONS.items()):
            if np.any(schedule.action == action):
                axes.add_patch(
                    Rectangle((left, middle - 5), 10, 10, fc=COLOUR[f"part{part}"], linewidth=0)
                )
                axes.text(left + 15, middle + 0.5, name, color=COLOUR["muted"], **TEXT)
                left += 30 + 6.2 * len(name)
        title = f"Schedule {schedule.name}: {schedule.stages} stages"
        return svg.inline(figure, key, title, described(schedule))


def schedule_page(schedules: Sequence[Schedule]) -> str:
    """One HTML page that needs no network, with a picture of each schedule."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sparse_dataflow.reporting", "."), autoescape=True
    )
    shown = [
        {"words": described(schedule), "picture": schedule_picture(schedule, f"schedule{number}")}
        for number, schedule in enumerate(schedules)
    ]
    return environment.get_template("schedules.html.jinja").render(schedules=shown)


def described(schedule: Schedule) -> str:
    """The schedule in words."""
    chunks = f" of {schedule.chunks} chunks each" if schedule.chunks > 1 else ""
    return (
        f"{schedule.name}: {schedule.stages} stages{chunks}, {schedule.micro_batches} "
        f"micro-batches, {schedule.ticks} ticks, of which {schedule.bubble():.1%} are idle."
    )
