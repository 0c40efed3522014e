"""Figures of a search's page, as inline SVG: roofline, time, sensitivity and scaling."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from sparse_dataflow.hardware.chips import TERA, Chip
from sparse_dataflow.planner.step_time import GROUPS, Section
from sparse_dataflow.reporting.figures import svg
from sparse_dataflow.reporting.figures.svg import COLOUR, TEXT

_WIDTH, _HEIGHT, _ROW = 720, 330, 30
_MARKERS = "osD^v"
_MODELS = ("dense", "muted", "sparse", "narrow")
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


@contextlib.contextmanager
def _axes(height: float, left: float = 64, right: float = 16) -> Iterator[tuple[Figure, Axes]]:
    with matplotlib.rc_context(svg.STYLE):
        figure = svg.new_figure(_WIDTH, height)
        box = (left / _WIDTH, 46 / height, 1 - (left + right) / _WIDTH, 1 - 66 / height)
        yield figure, figure.add_axes(box)


@svg.drawn
def roofline(chip: Chip, dtype: str, models: Mapping[str, Mapping[str, Section]]) -> Markup:
    """Draws the sections of several models on a chip's roofline.

    Args:
      chip: chip with its FLOP rate and bandwidth.
      dtype: dtype of the matrix products.
      models: label -> section name -> `Section`; at most four labels.
    """
    peak, bandwidth = chip.rates(dtype)
    names = list(next(iter(models.values())))
    with _axes(_HEIGHT, right=190) as (figure, axes):
        ends = [peak / bandwidth]
        for colour, (label, sections) in zip(_MODELS, models.items()):
            for marker, section in zip(_MARKERS, sections.values()):
                ends.append(float(section.intensity))
                rate = float(section.flops / section.seconds) / TERA
                axes.plot(ends[-1], rate, marker, color=COLOUR[colour], markersize=7)
            axes.plot([], [], "s", color=COLOUR[colour], label=label)
        for marker, name in zip(_MARKERS, names):
            axes.plot([], [], marker, color=COLOUR["ink"], label=name)
        x = np.geomspace(min(ends) / 3, max(ends) * 3, 100)
        axes.plot(x, np.minimum(peak, x * bandwidth) / TERA, color=COLOUR["ink"], linewidth=1.3)
        axes.set(xscale="log", yscale="log", xlabel="FLOP per byte of memory traffic")
        axes.set_ylabel("TFLOP/s of one chip")
        _plain(axes)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, fontsize=10)
        words = f"Sections of a block on the roofline of {chip.name}"
        return svg.inline(figure, "roofline", "Roofline", words)


@svg.drawn
def times(rows: Sequence[Mapping[str, float]], recommended: int) -> Markup:
    """Draws where the time of each plan goes, as stacked bars of milliseconds.

    Args:
      rows: name in GROUPS -> seconds, of each plan.
      recommended: index of the plan whose label is bold.
    """
    with _axes(_ROW * len(rows) + 104, left=84) as (figure, axes):
        for number, groups in enumerate(rows):
            left = 0.0
            for index, name in enumerate(GROUPS):
                seconds = float(groups[name])
                colour = COLOUR[f"category{index}"]
                axes.barh(number, seconds, left=left, color=colour, height=0.72)
                left += seconds
            axes.text(left, number, f" {left:.3g} s", color=COLOUR["ink"], fontsize=10, **TEXT)
        for index, name in enumerate(GROUPS):
            axes.barh(0, 0, color=COLOUR[f"category{index}"], label=name)
        axes.set_yticks(range(len(rows)), [f"plan {n + 1}" for n in range(len(rows))])
        axes.get_yticklabels()[recommended].set_fontweight("bold")
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * max(sum(map(float, groups.values())) for groups in rows))
        axes.set_xlabel("seconds of a step")
        axes.legend(
            loc="lower left", bbox_to_anchor=(-0.12, 1.0), ncols=3, frameon=False, fontsize=10
        )
        axes.set_position(
            (84 / _WIDTH, 46 / figure.bbox.height, 1 - 100 / _WIDTH, 1 - 104 / figure.bbox.height)
        )
        return svg.inline(figure, "times", "Where the time goes", "Seconds by group of terms")


@svg.drawn
def sensitivity(effects: Mapping[str, float], levels: Mapping[str, Mapping]) -> Markup:
    """Draws the effect of each level of each choice on throughput, largest Shapley effect first.

    Args:
      effects: choice -> share of the variance of throughput.
      levels: choice -> level -> mean throughput at the level minus the mean of all.
    """
    names = list(effects)
    with _axes(_ROW * 1.25 * len(names) + 80, left=150, right=70) as (figure, axes):
        shades = matplotlib.colormaps["viridis"]
        for row, name in enumerate(names):
            values = levels[name]
            for number, (level, value) in enumerate(values.items()):
                shade = shades(number / max(len(values) - 1, 1))
                axes.plot(value, row, "o", color=shade, markersize=9, markeredgecolor="none")
                if number in (0, len(values) - 1) and len(values) > 1:
                    axes.annotate(
                        str(level), (value, row), (0, 7 if number else -13), ha="center",
                        textcoords="offset points", fontsize=8, color=COLOUR["muted"],
                    )  # fmt: skip
        axes.axvline(0, color=COLOUR["rule"], linewidth=1, zorder=0)
        labels = [f"{name.replace('_', '-')}  {effects[name]:.0%}" for name in names]
        axes.set_yticks(range(len(names)), labels)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlabel(
            "effect of a level on tokens per second and chip, plans that cannot run as 0"
        )
        words = "; ".join(f"{name} {effect:.0%}" for name, effect in effects.items())
        return svg.inline(figure, "sensitivity", "What decides the throughput", words)


@svg.drawn
def scaling(points: Sequence[tuple[int, float]], chips: int) -> Markup:
    """Draws tokens per second of the best plan over the number of chips, for one batch.

    Args:
      points: (chips, tokens per second), at least one.
      chips: number of chips of the request, whose point is filled.
    """
    counts, speeds = (np.array(values, float) for values in zip(*points))
    with _axes(_HEIGHT, left=84) as (figure, axes):
        axes.plot(counts, speeds[0] / counts[0] * counts, "--", color=COLOUR["muted"], linewidth=1)
        axes.plot(counts, speeds, color=COLOUR["sparse"], linewidth=1.6)
        for count, speed in zip(counts, speeds):
            face = COLOUR["sparse"] if count == chips else COLOUR["paper"]
            axes.plot(count, speed, "o", color=COLOUR["sparse"], markerfacecolor=face)
            share = speed / count / (speeds[0] / counts[0])
            axes.annotate(
                f"{speed:,.0f}\n{share:.0%}", (count, speed), (8, -24),
                textcoords="offset points", fontsize=10, color=COLOUR["ink"],
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="chips", ylabel="tokens per second")
        axes.set_xlim(counts[0] / 1.15, counts[-1] * 1.5)
        axes.set_ylim(speeds.min() / 1.8, speeds.max() * 1.4)
        axes.set_xticks(counts, [f"{int(count):,}" for count in counts])
        _plain(axes)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        words = "; ".join(f"{count:,} chips: {speed:,.0f}" for count, speed in points)
        return svg.inline(figure, "scaling", "Strong scaling", words)


def _plain(axes):
    axes.grid(True)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(_PLAIN)
        axis.set_minor_formatter(NullFormatter())
