"""Figures of studies: curves, samples and labels."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.studies.panels import Curve, Panel, save_panels, save_strips


@pytest.fixture
def saved_figures(monkeypatch):
    """List of all figures that are saved."""
    figures = []
    save = Figure.savefig

    def saved(self, *arguments, **options):
        figures.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    return figures


def test_panels_show_curves_markers_and_spreads_with_one_colour_per_name(saved_figures, tmp_path):
    x = np.array([1.0, 2.0, 4.0])
    panels = [
        Panel("first", "x", "y", {"a": Curve(x, x, x - 1, x + 1), "b": Curve(x, 2 * x)}, log_x=2),
        Panel("second", "x", "y", {"b": Curve(x, 3 * x, joined=False)}, ticks=x, limits=(0, 20)),
        *(Panel(str(i), "x", "y", {"c": Curve(x, x, marked=False, dashed=True)}) for i in range(3)),
    ]
    save_panels(tmp_path / "new" / "figure.png", panels, "title")
    assert (tmp_path / "new" / "figure.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = saved_figures
    first, second, third, *_ = figure.axes
    assert [axes.get_title() for axes in figure.axes[:5]] == ["first", "second", "0", "1", "2"]
    np.testing.assert_array_equal(first.lines[1].get_ydata(), 2 * x)
    assert first.lines[1].get_color() == second.lines[0].get_color()
    assert len(first.collections) == 1 and not second.collections
    assert second.lines[0].get_linestyle() == "None" and third.lines[0].get_linestyle() == "--"
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["a", "b", "c"]
    assert figure.get_suptitle() == "title" and second.get_ylim() == (0, 20)
    assert first.get_xscale() == "log" and second.get_xscale() == "linear"


def test_panels_without_a_common_name_have_separate_legends(saved_figures, tmp_path):
    panel_curves = [{"a": Curve([0, 1], [0, 1])}, {"b": Curve([0, 1], [0, 1])}]
    save_panels(tmp_path / "figure.png", [Panel("", "x", "y", c) for c in panel_curves])
    (figure,) = saved_figures
    names = [[t.get_text() for t in axes.get_legend().get_texts()] for axes in figure.axes]
    assert names == [["a"], ["b"]] and not figure.legends


def test_strips_show_samples_and_means_with_the_lowest_on_top(saved_figures, tmp_path):
    groups = {"equal tokens": {"dense": [2.0, 2.1], "rigl": [2.2]}, "equal FLOPs": {"rigl": [2.0]}}
    save_strips(tmp_path / "strips.png", groups, "bits per byte", "dense")
    first, second = saved_figures[0].axes
    assert [t.get_text() for t in first.get_yticklabels()] == ["rigl", "dense"]
    strokes, samples = first.lines[:4:2], first.lines[1:4:2]
    assert [list(line.get_xdata()) for line in samples] == [[2.2], [2.0, 2.1]]
    assert [line.get_xdata()[0] for line in strokes] == pytest.approx([2.2, 2.05])
    low, high = first.get_xlim()
    assert low < 2.0 < 2.2 < high
    assert len(first.lines) == 5 and len(second.lines) == 2  # only `first` has the reference
