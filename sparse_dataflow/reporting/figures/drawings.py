"""Figures of the report as inline SVG, drawn by matplotlib (see svg.py).

Each variant has the same colour and marker in all figures.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import EngFormatter, MaxNLocator

from sparse_dataflow.monitoring.presentation import figure_names, presentation
from sparse_dataflow.reporting import quantities
from sparse_dataflow.reporting.figures import svg
from sparse_dataflow.reporting.figures.svg import COLOUR, TEXT

WIDTH = 420
"""Width of charts in SVG units, close to a column of the page and to a phone's screen, so text is
not scaled."""

Row = Mapping[str, Any]

_MARKER = {"sparse": "o", "dense": "s", "narrow": "^"}
_MAX_POINTS = 300
_HALF_WINDOW = 1 / 40
_STEEP_START = 0.05
_BAR_HEIGHT = 52
_LONGEST_LABEL = 28
_TICK_STEPS = (1, 2, 2.5, 5, 10)


def series(history: Sequence[Row], kind: str, x: str, y: str) -> np.ndarray:
    """Returns the finite points (x, y) of one kind of metrics row, sorted, float64 [points, 2]."""
    rows = [(row.get(x), row.get(y)) for row in history if row.get("kind") == kind]
    points = [(quantities.finite(a), quantities.finite(b)) for a, b in rows]
    points = sorted(p for p in points if None not in p)
    return np.array(points, np.float64).reshape(-1, 2)


def held_out(history: Sequence[Row], x: str) -> np.ndarray:
    """Returns the points (x, loss) of the held-out text, float64 [points, 2].

    The evaluation after the last step, which is the result of a run, stands in place of the
    periodic one of the same step.
    """
    final = {row.get("step") for row in history if row.get("kind") == "final"}
    rows = [
        {**row, "kind": "eval"}
        for row in history
        if row.get("kind") == "final"
        or (row.get("kind") == "eval" and row.get("step") not in final)
    ]
    return series(rows, "eval", x, "loss")


def smooth(values: np.ndarray) -> np.ndarray:
    """Returns the centred moving mean over about 1/20 of the curve, shape [n].

    At the steep start of a curve the window shrinks symmetrically, which avoids a lag. At its flat
    end only the missing half is dropped, which avoids noise.
    """
    index = np.arange(len(values))
    half = np.minimum(round(len(values) * _HALF_WINDOW), index)
    stop = np.minimum(index + half + 1, len(values))
    # A mean of any window is one difference of two sums.
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[stop] - sums[index - half]) / (stop - index + half)


def bits_per_nat(histories: Mapping[str, Sequence[Row]]) -> float | None:
    """Returns the ratio of held-out bits per byte to loss per token.

    It is constant for a corpus and tokenizer. Returns None without evaluations, or where the ratio
    is not constant to rounding.
    """
    evaluations = [series(rows, "eval", "loss", "bits_per_byte") for rows in histories.values()]
    points = np.concatenate([*evaluations, np.zeros((0, 2))])
    points = points[(points > 0).all(axis=1)]
    if not len(points):
        return None
    ratios = points[:, 1] / points[:, 0]
    return float(np.median(ratios)) if np.ptp(ratios) <= 1e-3 * np.median(ratios) else None


_X = {"tokens": "tokens", "seconds": "wall-clock time", "flops": "training FLOPs"}


def loss_curves(
    histories: Mapping[str, Sequence[Row]], x: str, key: str
) -> tuple[Markup, bool] | None:
    """Plots training loss (line) and held-out loss (markers) of each variant against `x`.

    Args:
      histories: variant name -> metrics rows.
      x: number of the rows, "tokens", "seconds" or "flops".
      key: prefix of the figure's ids, unique on the page.

    Returns:
      (SVG or why it cannot be drawn, whether the steep start of training is outside the axes); None
      without points.
    """
    figure = svg.drawn(_loss_curves)(histories, x, key)
    return (figure, False) if isinstance(figure, Markup) else figure


def _loss_curves(
    histories: Mapping[str, Sequence[Row]], x: str, key: str
) -> tuple[Markup, bool] | None:
    lines = {name: series(rows, "train", x, "loss") for name, rows in histories.items()}
    marks = {name: held_out(rows, x) for name, rows in histories.items()}
    for line in lines.values():
        line[:, 1] = smooth(line[:, 1])
    points = np.concatenate([*lines.values(), *marks.values()])
    if not len(points):
        return None
    scale, label = _x_unit(x, points[:, 0].max())
    with matplotlib.rc_context(svg.STYLE):
        figure = svg.new_figure(WIDTH, 290)
        axes = figure.add_axes((0.115, 0.15, 0.765, 0.83))
        for name in histories:
            line = subsample(lines[name])
            # A line of a single point is invisible without a marker.
            style = ".-" if len(line) == 1 else "-"
            axes.plot(line[:, 0] / scale, line[:, 1], style, color=COLOUR[name], linewidth=1.5)
            axes.plot(
                marks[name][:, 0] / scale,
                marks[name][:, 1],
                color=COLOUR[name],
                linestyle="none",
                marker=_MARKER[name],
                markersize=6.5,
                markeredgecolor=COLOUR["paper"],
                zorder=3,
            )
            final = series(histories[name], "final", x, "loss")
            axes.plot(
                final[:, 0] / scale,
                final[:, 1],
                color=COLOUR[name],
                linestyle="none",
                marker=_MARKER[name],
                markersize=11,
                markeredgecolor=COLOUR["ink"],
                zorder=4,
            )
        clipped = _frame_loss(axes, [*lines.values(), *marks.values()])
        axes.set_xlim(left=0)
        axes.set(xlabel=label, ylabel="loss, nats per token")
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=_TICK_STEPS))
        if x != "seconds":
            axes.xaxis.set_major_formatter(EngFormatter(sep="\N{NO-BREAK SPACE}"))
        _bits_axis(axes, bits_per_nat(histories))
        handles = [
            Line2D([], [], color=COLOUR[n], marker=_MARKER[n], markersize=6.5,
                   markeredgecolor=COLOUR["paper"], label=n)
            for n in histories
        ]  # fmt: skip
        axes.legend(handles=handles, loc="upper right", frameon=False, handlelength=2.2)
        title = f"Loss against {_X[x]}"
        return svg.inline(figure, key, title, _describe_curves(lines, marks, x)), clipped


@svg.drawn
def number_curves(histories: Mapping[str, Sequence[Row]], field: str, key: str) -> Markup | None:
    """Plots a number of the training rows, smoothed, against training tokens.

    Args:
      histories: variant name -> metrics rows.
      field: name of the number; see `monitoring.presentation`.
      key: prefix of the figure's ids, unique on the page.

    Returns:
      The SVG; None without points.
    """
    lines = {name: series(rows, "train", "tokens", field) for name, rows in histories.items()}
    title = presentation(field).title
    if not any(map(len, lines.values())):
        return None
    with matplotlib.rc_context(svg.STYLE):
        figure = svg.new_figure(WIDTH, 180)
        axes = figure.add_axes((0.145, 0.24, 0.735, 0.7))
        for name, line in lines.items():
            values = subsample(np.column_stack([line[:, 0], smooth(line[:, 1])]))
            style = ".-" if len(values) == 1 else "-"
            axes.plot(values[:, 0], values[:, 1], style, color=COLOUR[name], linewidth=1.5)
        axes.set_xlim(left=0)
        if min(line[:, 1].min() for line in lines.values() if len(line)) >= 0:
            axes.set_ylim(bottom=0)
        axes.set_xlabel("training tokens")
        label = title.lower() if len(title) <= _LONGEST_LABEL else f"{title[:_LONGEST_LABEL]}…"
        axes.set_ylabel(label, parse_math=False)
        axes.spines["right"].set_visible(False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(EngFormatter(sep="\N{NO-BREAK SPACE}"))
            axis.set_major_locator(MaxNLocator(4, steps=_TICK_STEPS))
        last = {name: line[-1, 1] for name, line in lines.items() if len(line)}
        ends = [f"{name}: last {quantities.significant(value)}" for name, value in last.items()]
        return svg.inline(figure, key, title, "; ".join(ends) + ".")


def metric_curves(histories: Mapping[str, Sequence[Row]], key: str) -> list[Markup]:
    """Returns `number_curves` of each metric of the training rows; see `figure_names`."""
    curves = (
        number_curves(histories, name, f"{key}{i}")
        for i, name in enumerate(figure_names(histories.values()))
    )
    return [curve for curve in curves if curve]


@svg.drawn
def stacked_bars(
    bars: Mapping[str, Mapping[str, float]],
    categories: Sequence[str],
    totals: Mapping[str, str],
    key: str,
    title: str,
) -> Markup:
    """Draws one horizontal stacked bar per variant, all on the same scale.

    Args:
      bars: variant name -> category -> value >= 0.
      categories: all categories in drawing order, at most `svg.CATEGORIES`; category i has the
        colour --category<i>.
      totals: variant name -> text at the end of the bar.
      key: prefix of the figure's ids, unique on the page.
      title: accessible title of the figure.
    """
    height = _BAR_HEIGHT * len(bars) + 6
    unit = 0.8 * WIDTH / (max(sum(values.values()) for values in bars.values()) or 1.0)
    with svg.drawing(WIDTH, height) as (figure, axes):
        for row, (variant, values) in enumerate(bars.items()):
            left, middle = 0.0, _BAR_HEIGHT * row + 34
            axes.text(0, middle - 23, variant, color=COLOUR[variant], fontweight="bold", **TEXT)
            for i, category in enumerate(categories):
                width = values.get(category, 0.0) * unit
                bar_width = width - min(1.0, width / 4)  # leaves a gap between segments
                axes.barh(middle, bar_width, height=24, left=left, align="center",
                          color=COLOUR[f"category{i}"])  # fmt: skip
                # About 6.5 units per character at this size.
                if width > 6.5 * len(category) + 8:
                    axes.text(left + bar_width / 2, middle + 0.5, category, ha="center",
                              fontsize=10, color=COLOUR[f"on-category{i}"], **TEXT)  # fmt: skip
                left += width
            axes.text(left + 6, middle + 0.5, totals[variant], color=COLOUR["ink"], **TEXT)
        description = "; ".join(f"{variant}: total {totals[variant]}" for variant in bars)
        return svg.inline(figure, key, title, f"{description}. See the table for all values.")


@svg.drawn
def block_picture(
    in_blocks: int,
    out_blocks: int,
    filled: Sequence[tuple[str, float, Sequence[Sequence[int]]]],
    cell: float,
    key: str,
    title: str,
    description: str,
) -> Markup:
    """Draws a grid of input blocks (rows) by output blocks (columns).

    Args:
      in_blocks: number of rows.
      out_blocks: number of columns.
      filled: (colour, opacity, pairs [row, column] of the blocks to fill), drawn in this order.
      cell: side of a block in SVG units; below 4, adjacent blocks are merged.
      key: prefix of the figure's ids, unique on the page.
      title: accessible title of the figure.
      description: accessible description of the figure.
    """
    width, height = out_blocks * cell, in_blocks * cell
    gap = 0.5 if cell >= 4 else 0.0
    with svg.drawing(width, height) as (figure, axes):
        background = _path([(0.0, 0.0, width, height)])
        axes.add_patch(PathPatch(background, fc=COLOUR["well"], linewidth=0))
        for colour, opacity, blocks in filled:
            boxes = [
                (column * cell + gap, row * cell + gap, length * cell - 2 * gap, cell - 2 * gap)
                for row, column, length in ([(*b, 1) for b in blocks] if gap else _runs(blocks))
            ]
            if boxes:
                axes.add_patch(
                    PathPatch(_path(boxes), fc=COLOUR[colour], linewidth=0, alpha=opacity)
                )
        return svg.inline(figure, key, title, description)


@svg.drawn
def load_picture(loads: Sequence[Sequence[float]], key: str, title: str) -> Markup:
    """Draws the load of experts as a grid of layers (rows) by experts (columns).

    A cell without load is empty, and one of twice the even load or more has the full colour.

    Args:
      loads: share of all choices that each expert of each layer has.
      key: prefix of the figure's ids, unique on the page.
      title: accessible title of the figure.
    """
    relative = np.array(loads) * len(loads[0])
    rows, columns = relative.shape
    cell = min(24.0, WIDTH / columns)
    with svg.drawing(columns * cell, rows * cell) as (figure, axes):
        well = _path([(0.0, 0.0, columns * cell, rows * cell)])
        axes.add_patch(PathPatch(well, fc=COLOUR["well"], linewidth=0))
        for row, column in np.ndindex(rows, columns):
            box = (column * cell + 0.5, row * cell + 0.5, cell - 1, cell - 1)
            alpha = min(1.0, relative[row, column] / 2)
            patch = PathPatch(_path([box]), fc=COLOUR["sparse"], alpha=alpha, linewidth=0)
            axes.add_patch(patch)
        description = (
            f"Experts have {relative.min():.2f} to {relative.max():.2f} times the even load."
        )
        return svg.inline(figure, key, title, description)


def _x_unit(x: str, largest: float) -> tuple[float, str]:
    if x != "seconds":
        return 1, f"training {x.replace('flops', 'FLOPs')}"
    scale, unit = next(
        (u for u in ((3600, "hours"), (60, "minutes")) if largest >= 3 * u[0]), (1, "seconds")
    )
    return scale, f"training wall-clock time, {unit}"


def subsample(line: np.ndarray) -> np.ndarray:
    """Returns at most 300 of the points [n, 2] of a curve, with its ends."""
    if not len(line):
        return line
    return line[np.unique(np.linspace(0, len(line) - 1, _MAX_POINTS).round().astype(int))]


def _frame_loss(axes: Axes, curves: Sequence[np.ndarray]) -> bool:
    """Limits the loss axis to the curves after their steep start; returns whether it is clipped."""
    curves = [c for c in curves if len(c)]
    losses = np.concatenate([c[c[:, 0] >= _STEEP_START * c[-1, 0], 1] for c in curves])
    low, high = losses.min(), losses.max()
    margin = 0.06 * ((high - low) or abs(high) or 1.0)
    axes.set_ylim(low - margin, high + margin)
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=_TICK_STEPS))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    return max(c[:, 1].max() for c in curves) > high + margin


def _bits_axis(axes: Axes, bits: float | None) -> None:
    if bits is None:
        axes.spines["right"].set_visible(False)
        return
    to_bits, to_nats = (lambda v: np.multiply(v, bits)), (lambda v: np.divide(v, bits))
    second = axes.secondary_yaxis("right", functions=(to_bits, to_nats))
    second.yaxis.set_major_locator(MaxNLocator(8, steps=_TICK_STEPS))
    second.set_ylabel("bits per byte")


def _describe_curves(lines: Mapping, marks: Mapping, x: str) -> str:
    def x_text(value):
        if x == "seconds":
            return quantities.durations([value])[0]
        return (
            quantities.flops([value])[0]
            if x == "flops"
            else f"{quantities.count([value])[0]} tokens"
        )

    sentences = []
    for name in lines:
        kind, points = ("Held-out", marks[name]) if len(marks[name]) else ("Training", lines[name])
        if len(points):
            start, end = (f"{loss:.3f} at {x_text(value)}" for value, loss in points[[0, -1]])
            sentences.append(f"{kind} loss, {name}: {start}, {end}.")
    return " ".join(sentences)


def _runs(mask: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Returns (row, first column, length) of each run of adjacent stored blocks in a row."""
    runs: list[tuple[int, int, int]] = []
    for row, column in sorted((row, column) for row, column in mask):
        # First column and length add up to the column behind the run.
        if runs and runs[-1][0] == row and sum(runs[-1][1:]) == column:
            runs[-1] = (row, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((row, column, 1))
    return runs


def _path(boxes: Sequence[tuple[float, float, float, float]]) -> Path:
    """Returns one path of all (x, y, width, height), to keep the page small."""
    x, y, w, h = np.array(boxes, np.float64).T
    corners = np.stack([x, y, x + w, y, x + w, y + h, x, y + h, x, y], axis=1).reshape(-1, 2)
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
    return Path(corners, codes)
