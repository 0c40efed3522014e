"""Timeline of one relay step: fetch, compute, return and update of each section."""

from collections.abc import Sequence

import matplotlib
from markupsafe import Markup

from sparse_dataflow.reporting import svg
from sparse_dataflow.reporting.svg import COLOUR, TEXT

WIDTH = 680
LANES = ("fetch", "compute", "return", "update")
_LANE = 34

Span = tuple[str, str, float, float]
"""(kind, one of LANES; section; start in seconds; stop in seconds)."""


def timeline(spans: Sequence[Span], key: str, description: str) -> Markup:
    """Draws one lane per kind of work with one bar per span, labelled where there is room.

    A section has the same colour in all lanes.

    Args:
      spans: spans of one step, at least one.
      key: prefix of the figure's ids, unique on the page.
      description: accessible description of the figure.
    """
    first = min(start for _, _, start, _ in spans)
    last = max(stop for *_, stop in spans)
    length = (last - first) or 1.0
    sections = list(dict.fromkeys(section for _, section, *_ in sorted(spans, key=_start)))
    height = _LANE * len(LANES) + 26
    with matplotlib.rc_context(svg.STYLE):
        figure = svg.new_figure(WIDTH, height)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        axes.set_axis_off()
        unit = (WIDTH - 70) / length
        for lane, kind in enumerate(LANES):
            middle = _LANE * lane + 18
            axes.text(0, middle, kind, color=COLOUR["ink"], **TEXT)
            for section, start, stop in _merged(spans, kind):
                left, width = 64 + (start - first) * unit, (stop - start) * unit
                category = sections.index(section) % svg.CATEGORIES
                axes.barh(
                    middle,
                    max(width, 0.6),
                    height=22,
                    left=left,
                    align="center",
                    color=COLOUR[f"category{category}"],
                )
                label = section.removeprefix("block ")
                if width > 7 * len(label) + 4:
                    axes.text(
                        left + width / 2,
                        middle,
                        label,
                        ha="center",
                        fontsize=10,
                        color=COLOUR[f"on-category{category}"],
                        **TEXT,
                    )
        axes.text(64, height - 10, "0", color=COLOUR["muted"], **TEXT)
        axes.text(
            WIDTH - 4,
            height - 10,
            f"{1e3 * length:,.3g} ms",
            ha="right",
            color=COLOUR["muted"],
            **TEXT,
        )
        return svg.inline(figure, key, "Timeline of a step", description)


def _start(span):
    return span[2]


def _merged(spans, kind):
    """Returns [section, start, stop] of a kind; merges overlapping spans of one section."""
    merged: list[list] = []
    of_kind = sorted((s for s in spans if s[0] == kind), key=lambda span: (span[1], span[2]))
    for _, section, start, stop in of_kind:
        if merged and merged[-1][0] == section and start <= merged[-1][2]:
            merged[-1][2] = max(merged[-1][2], stop)
        else:
            merged.append([section, start, stop])
    return merged
