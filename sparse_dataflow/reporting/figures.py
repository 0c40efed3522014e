"""The report's figures: plain data -> inline SVG text, drawn by matplotlib (see svg.py).

A variant has one colour and one marker wherever it appears.
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

from sparse_dataflow.reporting import quantities, svg
from sparse_dataflow.reporting.svg import COLOUR, TEXT

WIDTH = 420
"""Width of charts in SVG units: near one column of the page and near a phone, so type keeps its
size."""

Row = Mapping[str, Any]

_MARKER = {"sparse": "o", "dense": "s"}
_POINTS = 300
_HALF_WINDOW = 1 / 40
_STEEP_START = 0.05
_BAR = 52
_TICKS = (1, 2, 2.5, 5, 10)


def series(history: Sequence[Row], kind: str, x: str, y: str) -> np.ndarray:
    """The finite points (x, y) of one kind of metrics row, float64 [points, 2], in order of x."""
    rows = [(row.get(x), row.get(y)) for row in history if row.get("kind") == kind]
    points = [(quantities.finite(a), quantities.finite(b)) for a, b in rows]
    points = sorted(p for p in points if None not in p)
    return np.array(points, np.float64).reshape(-1, 2)


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving mean over about 1/20 of the curve; shape [n] kept.

    The window stays symmetric where the curve starts, and falls steeply; where it ends, and is
    flat, only the missing half is left out, so that the last points are no noisier than the rest.
    """
    at = np.arange(len(values))
    half = np.minimum(round(len(values) * _HALF_WINDOW), at)
    stop = np.minimum(at + half + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[stop] - sums[at - half]) / (stop - at + half)


def bits_per_nat(histories: Mapping[str, Sequence[Row]]) -> float | None:
    """Bits per byte of held-out text over loss per token: one constant per corpus and tokenizer.

    None where nothing was evaluated, or where the rows differ in it by more than rounding.
    """
    found = [series(rows, "eval", "loss", "bits_per_byte") for rows in histories.values()]
    points = np.concatenate([*found, np.zeros((0, 2))])
    points = points[(points > 0).all(axis=1)]
    if not len(points):
        return None
    ratios = points[:, 1] / points[:, 0]
    return float(np.median(ratios)) if np.ptp(ratios) <= 1e-3 * np.median(ratios) else None


def loss_curves(
    histories: Mapping[str, Sequence[Row]], x: str, key: str
) -> tuple[Markup, bool] | None:
    """Training loss (line) and held-out loss (marks) of each variant against `x`.

    Args:
      histories: variant name -> metrics rows.
      x: "tokens" or "seconds".
      key: prefix of the figure's ids, unique on the page.

    Returns:
      The SVG, and whether the steep start of training lies above the frame; None without points.
    """
    lines = {name: series(rows, "train", x, "loss") for name, rows in histories.items()}
    marks = {name: series(rows, "eval", x, "loss") for name, rows in histories.items()}
    for line in lines.values():
        line[:, 1] = smooth(line[:, 1])
    everything = np.concatenate([*lines.values(), *marks.values()])
    if not len(everything):
        return None
    scale, label = _x_unit(x, everything[:, 0].max())
    with matplotlib.rc_context(svg.STYLE):
        figure = svg.figure(WIDTH, 290)
        axes = figure.add_axes((0.115, 0.15, 0.765, 0.83))
        for name in histories:
            few = _thinned(lines[name])
            # A line of one point would not show.
            dot = "." if len(few) == 1 else ""
            axes.plot(few[:, 0] / scale, few[:, 1], dot + "-", color=COLOUR[name], linewidth=1.5)
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
        clipped = _frame_loss(axes, [*lines.values(), *marks.values()])
        axes.set_xlim(left=0)
        axes.set(xlabel=label, ylabel="loss, nats per token")
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=_TICKS))
        if x == "tokens":
            axes.xaxis.set_major_formatter(EngFormatter(sep="\N{NO-BREAK SPACE}"))
        _bits_axis(axes, bits_per_nat(histories))
        handles = [
            Line2D([], [], color=COLOUR[n], marker=_MARKER[n], markersize=6.5,
                   markeredgecolor=COLOUR["paper"], label=n)
            for n in histories
        ]  # fmt: skip
        axes.legend(handles=handles, loc="upper right", frameon=False, handlelength=2.2)
        against = "tokens" if x == "tokens" else "wall-clock"
        described = _describe_curves(lines, marks, x)
        return svg.inline(figure, key, f"Loss against {against}", described), clipped


def stacked_bars(
    parts: Mapping[str, Mapping[str, float]],
    names: Sequence[str],
    totals: Mapping[str, str],
    key: str,
    title: str,
) -> Markup:
    """One horizontal bar a variant, made of its parts, all bars to one scale.

    Args:
      parts: variant name -> part name -> value >= 0.
      names: every part, at most `svg.PARTS`, in the order drawn; part i has the colour --part<i>.
      totals: variant name -> the text at the end of its bar.
      key: prefix of the figure's ids, unique on the page.
      title: what the figure is called when read aloud.
    """
    height = _BAR * len(parts) + 6
    unit = 0.8 * WIDTH / (max(sum(values.values()) for values in parts.values()) or 1.0)
    with matplotlib.rc_context(svg.STYLE):
        figure = svg.figure(WIDTH, height)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        axes.set_axis_off()
        for row, (variant, values) in enumerate(parts.items()):
            left, middle = 0.0, _BAR * row + 34
            axes.text(0, middle - 23, variant, color=COLOUR[variant], fontweight="bold", **TEXT)
            for i, name in enumerate(names):
                width = values.get(name, 0.0) * unit
                drawn = width - min(1.0, width / 4)
                axes.barh(middle, drawn, height=24, left=left, align="center",
                          color=COLOUR[f"part{i}"])  # fmt: skip
                # Room for a label is reckoned at a bold average character of this size.
                if width > 6.5 * len(name) + 8:
                    axes.text(left + drawn / 2, middle + 0.5, name, ha="center", fontsize=10,
                              color=COLOUR[f"on-part{i}"], **TEXT)  # fmt: skip
                left += width
            axes.text(left + 6, middle + 0.5, totals[variant], color=COLOUR["ink"], **TEXT)
        described = "; ".join(f"{variant}: {totals[variant]} in all" for variant in parts)
        return svg.inline(figure, key, title, f"{described}. The table has every part.")


def block_picture(
    in_blocks: int,
    out_blocks: int,
    mask: Sequence[Sequence[int]],
    cell: float,
    key: str,
    title: str,
) -> Markup:
    """A layout as a grid, input blocks down and output blocks across, stored blocks filled.

    Args:
      in_blocks: rows.
      out_blocks: columns.
      mask: pairs [row, column] of the stored blocks.
      cell: side of a block in SVG units; below 4 touching blocks are drawn as one bar.
      key: prefix of the figure's ids, unique on the page.
      title: what the picture is called when read aloud.
    """
    width, height = out_blocks * cell, in_blocks * cell
    gap = 0.5 if cell >= 4 else 0.0
    runs = [(row, column, 1) for row, column in mask] if gap else _runs(mask)
    boxes = [
        (column * cell + gap, row * cell + gap, length * cell - 2 * gap, cell - 2 * gap)
        for row, column, length in runs
    ]
    with matplotlib.rc_context(svg.STYLE):
        figure = svg.figure(width, height)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        for colour, drawn in (("well", [(0.0, 0.0, width, height)]), ("sparse", boxes)):
            if drawn:
                axes.add_patch(PathPatch(_rectangles(drawn), fc=COLOUR[colour], linewidth=0))
        described = f"{len(mask)} of {in_blocks * out_blocks} blocks are stored."
        return svg.inline(figure, key, title, described)


def _x_unit(x: str, largest: float) -> tuple[float, str]:
    if x == "tokens":
        return 1, "tokens trained on"
    scale, unit = next(
        (u for u in ((3600, "hours"), (60, "minutes")) if largest >= 3 * u[0]), (1, "seconds")
    )
    return scale, f"training wall-clock, {unit}"


def _thinned(line: np.ndarray) -> np.ndarray:
    if not len(line):
        return line
    return line[np.unique(np.linspace(0, len(line) - 1, _POINTS).round().astype(int))]


def _frame_loss(axes: Axes, curves: Sequence[np.ndarray]) -> bool:
    """Frames the loss where curves differ, past their steep start; True where that is cut off."""
    curves = [c for c in curves if len(c)]
    shown = np.concatenate([c[c[:, 0] >= _STEEP_START * c[-1, 0], 1] for c in curves])
    low, high = shown.min(), shown.max()
    margin = 0.06 * ((high - low) or abs(high) or 1.0)
    axes.set_ylim(low - margin, high + margin)
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=_TICKS))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    return max(c[:, 1].max() for c in curves) > high + margin


def _bits_axis(axes: Axes, bits: float | None) -> None:
    if bits is None:
        axes.spines["right"].set_visible(False)
        return
    there, back = (lambda v: np.multiply(v, bits)), (lambda v: np.divide(v, bits))
    second = axes.secondary_yaxis("right", functions=(there, back))
    second.yaxis.set_major_locator(MaxNLocator(8, steps=_TICKS))
    second.set_ylabel("bits per byte")


def _describe_curves(lines: Mapping, marks: Mapping, x: str) -> str:
    at = quantities.durations if x == "seconds" else lambda v: [f"{quantities.count(v)[0]} tokens"]
    sentences = []
    for name in lines:
        kind, points = ("Held-out", marks[name]) if len(marks[name]) else ("Training", lines[name])
        if len(points):
            start, end = ((f"{loss:.3f}", at([where])[0]) for where, loss in points[[0, -1]])
            sentences.append(
                f"{kind} loss, {name}: {start[0]} at {start[1]}, {end[0]} at {end[1]}."
            )
    return " ".join(sentences)


def _runs(mask: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """(row, first column, length) of stored blocks that touch along a row."""
    runs: list[tuple[int, int, int]] = []
    for row, column in sorted((row, column) for row, column in mask):
        if runs and runs[-1][0] == row and sum(runs[-1][1:]) == column:
            runs[-1] = (row, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((row, column, 1))
    return runs


def _rectangles(boxes: Sequence[tuple[float, float, float, float]]) -> Path:
    """One path for all (x, y, width, height): thousands of blocks stay one element of the page."""
    x, y, w, h = np.array(boxes, np.float64).T
    corners = np.stack([x, y, x + w, y, x + w, y + h, x, y + h, x, y], axis=1).reshape(-1, 2)
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
    return Path(corners, codes)
