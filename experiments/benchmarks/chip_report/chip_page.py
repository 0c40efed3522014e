"""Page of a chip report: the answer, the ratios as bars, and every row."""

from markupsafe import Markup

from sparse_dataflow.reporting import quantities, templates
from sparse_dataflow.reporting.figures import svg
from sparse_dataflow.reporting.figures.svg import COLOUR, TEXT

from .chip_data import DONE, ChipReport, Measure

TARGET = "13b"
"""Scale that the question is about; a report of another scale says so."""

_WIDTH, _LABEL, _VALUE, _ROW, _TOP = 720, 250, 150, 34, 8


def render(report: ChipReport) -> str:
    """Returns the report as one HTML page that needs no network."""
    measures = [m for row in report.rows for m in row.measures if m.ratio is not None]
    contents = {
        "report": report,
        "memory": quantities.size([report.chip.memory_bytes])[0],
        "missing": [row for row in report.rows if row.status != DONE],
        "other_scale": "" if report.scale == TARGET else report.scale,
        "bars": ratio_bars(measures) if measures else None,
        "ratio_text": ratio_text,
    }
    return templates.html("chip.html.jinja", contents)


def ratio_text(measure: Measure) -> str:
    """Returns the ratio of a measure with its bound, e.g. "4.52x of 5.89x"."""
    if measure.ratio is None:
        return ""
    bound = "" if measure.bound is None else f" of {measure.bound:.2f}x"
    return f"{measure.ratio:.2f}x{bound}"


@svg.drawn
def ratio_bars(measures: list[Measure]) -> Markup:
    """Draws a bar per ratio, its quartiles as a line and its bound as a mark.

    Args:
      measures: figures with a ratio, at least one.
    """
    height = _TOP + _ROW * len(measures) + 24
    largest = max(max(m.ratio or 0, m.high or 0, m.bound or 0, 1.0) for m in measures)
    unit = (_WIDTH - _LABEL - _VALUE) / largest
    with svg.drawing(_WIDTH, height) as (figure, axes):
        for row, measure in enumerate(measures):
            middle, end = _TOP + _ROW * (row + 0.5), _LABEL + unit * (measure.ratio or 0)
            axes.text(0, middle, measure.label, color=COLOUR["ink"], fontsize=10, **TEXT)
            axes.barh(middle, end - _LABEL, left=_LABEL, height=18, color=COLOUR["sparse"])
            if measure.low is not None and measure.high is not None:
                ends = [_LABEL + unit * quartile for quartile in (measure.low, measure.high)]
                axes.plot(ends, [middle, middle], color=COLOUR["ink"], linewidth=1.5)
                end = max(end, *ends)
            if measure.bound is not None:
                mark = _LABEL + unit * measure.bound
                axes.plot([mark] * 2, [middle - 12, middle + 12], color=COLOUR["muted"],
                          linewidth=1.5)  # fmt: skip
                # The text is before the mark where it fits.
                end = end if mark - end > _VALUE - 30 else max(end, mark)
            axes.text(end + 8, middle, ratio_text(measure), color=COLOUR["ink"], **TEXT)
        bottom = _TOP + _ROW * len(measures)
        dense = [_LABEL + unit] * 2
        axes.plot(dense, [_TOP, bottom], color=COLOUR["dense"], linewidth=1.5)
        axes.text(dense[0], bottom + 10, "dense", ha="center", color=COLOUR["dense"], **TEXT)
        description = "; ".join(f"{m.label}: {ratio_text(m)}" for m in measures)
        return svg.inline(figure, "ratios", "Speed of sparse over dense", description)
