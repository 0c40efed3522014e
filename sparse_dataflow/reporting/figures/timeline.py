"""Timeline of one relay step: fetch, compute, return and update of each section."""

from collections.abc import Sequence

from markupsafe import Markup

from sparse_dataflow.reporting.figures import svg
from sparse_dataflow.reporting.figures.svg import COLOUR, TEXT

WIDTH = 680
LANES = ("fetch", "compute", "return", "update")
_LANE = 34

Span = tuple[str, str, float, float]
"""(kind, one of LANES; section; start in seconds; stop in seconds)."""


@svg.drawn
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
    by_start = sorted(spans, key=lambda span: span[2])
    sections = list(dict.fromkeys(section for _, section, *_ in by_start))
    height = _LANE * len(LANES) + 26
    with svg.drawing(WIDTH, height) as (figure, axes):
        unit = (WIDTH - 70) / length
        for lane, kind in enumerate(LANES):
            middle = _LANE * lane + 18
            axes.text(0, middle, kind, color=COLOUR["ink"], **TEXT)
            for section, start, stop in _merged(spans, kind):
                left, width = 64 + (start - first) * unit, (stop - start) * unit
                category = sections.index(section) % svg.CATEGORIES
                bar = {"height": 22, "left": left, "color": COLOUR[f"category{category}"]}
                axes.barh(middle, max(width, 0.6), **bar)
                label = section.removeprefix("block ")
                if width > 7 * len(label) + 4:
                    style = {"ha": "center", "color": COLOUR[f"on-category{category}"], **TEXT}
                    axes.text(left + width / 2, middle, label, fontsize=10, **style)
        muted = {"color": COLOUR["muted"], **TEXT}
        axes.text(64, height - 10, "0", **muted)
        axes.text(WIDTH - 4, height - 10, f"{1e3 * length:,.3g} ms", ha="right", **muted)
        return svg.inline(figure, key, "Timeline of a step", description)


def _merged(spans, kind):
    """Returns [section, start, stop] of a kind; merges overlapping spans of one section."""
    merged: list[list] = []
    kind_spans = sorted((s for s in spans if s[0] == kind), key=lambda span: (span[1], span[2]))
    for _, section, start, stop in kind_spans:
        if merged and merged[-1][0] == section and start <= merged[-1][2]:
            merged[-1][2] = max(merged[-1][2], stop)
        else:
            merged.append([section, start, stop])
    return merged
