import re
from xml.etree import ElementTree

import numpy as np
import pytest
import report_sample
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed import paths

from sparse_dataflow.reporting.figures import drawings, svg

HISTORIES = {name: report_sample.variant(name).history for name in ("dense", "sparse")}


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=200))
def test_smoothing_stays_within_the_data(values):
    smooth = drawings.smooth(np.array(values))
    assert smooth.shape == (len(values),)
    assert smooth.min() >= min(values) - 1e-9 and smooth.max() <= max(values) + 1e-9


def test_smoothing_does_not_lag_and_reduces_noise():
    line = np.linspace(5, 2, 200)
    np.testing.assert_allclose(drawings.smooth(line)[:190], line[:190], atol=1e-9)
    noise = np.random.default_rng(0).standard_normal(200)
    assert drawings.smooth(noise)[5:].std() < 0.5


def test_series_keeps_finite_points_in_order():
    rows = [{"kind": "train", "step": s, "loss": loss}
            for s, loss in ((3, 1.0), (1, 2.0), (2, float("nan")), (4, None))]  # fmt: skip
    rows.append({"kind": "eval", "step": 0, "loss": 9.0})
    np.testing.assert_array_equal(drawings.series(rows, "train", "step", "loss"), [[1, 2], [3, 1]])


@pytest.mark.parametrize("x", ["tokens", "seconds"])
def test_curves_have_a_marker_per_evaluation_in_the_variants_colour(x):
    picture, clipped = drawings.loss_curves(HISTORIES, x, "key")
    assert clipped
    for name, rows in HISTORIES.items():
        marks = [e for e in ElementTree.fromstring(picture).iter("use")
                 if f"fill: var(--{name})" in e.get("style", "")]  # fmt: skip
        evaluations = sum(row["kind"] == "eval" for row in rows)
        # The legend has one more.
        assert len(marks) == evaluations + 1
    assert "bits per byte" in picture


def test_the_last_marker_is_the_evaluation_of_the_headline():
    rows = [
        {"kind": "eval", "step": 5, "tokens": 50, "loss": 3.0},
        {"kind": "eval", "step": 10, "tokens": 100, "loss": 2.5},
        {"kind": "final", "step": 10, "tokens": 100, "loss": 2.25},
    ]
    assert drawings.held_out(rows, "tokens").tolist() == [[50, 3.0], [100, 2.25]]
    assert drawings.held_out(rows[:2], "tokens").tolist() == [[50, 3.0], [100, 2.5]]


def test_the_bits_axis_needs_a_constant_ratio_to_the_loss():
    assert drawings.bits_per_nat(HISTORIES) == pytest.approx(report_sample.BITS_PER_NAT)
    other = [{**row, "bits_per_byte": 1.0} for row in HISTORIES["dense"] if row["kind"] == "eval"]
    histories = {"dense": other, "sparse": HISTORIES["sparse"]}
    assert drawings.bits_per_nat(histories) is None
    assert "bits per byte" not in drawings.loss_curves(histories, "tokens", "key")[0]


@pytest.mark.parametrize("rows", [[], [{"kind": "train", "step": 1}]])
def test_without_points_there_is_no_figure(rows):
    assert drawings.loss_curves({"sparse": rows}, "tokens", "key") is None


@settings(max_examples=15)
@given(
    st.dictionaries(
        st.sampled_from(["dense", "sparse"]),
        st.dictionaries(st.sampled_from("abcde"), st.floats(0.1, 10), min_size=1),
        min_size=1,
    )
)
def test_bar_lengths_are_proportional_to_the_values(bars):
    totals = dict.fromkeys(bars, "all")
    picture = drawings.stacked_bars(bars, "abcde", totals, "key", "Bars")
    largest = max(sum(values.values()) for values in bars.values())
    for i, name in enumerate("abcde"):
        lengths = [np.ptp(p[:, 0]) for p in paths(picture, f"category{i}")]
        values = [values.get(name, 0.0) for values in bars.values()]
        expected = [0.8 * drawings.WIDTH * value / largest for value in values]
        assert lengths == pytest.approx(expected, abs=1.1)


@settings(max_examples=25)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 9), cell=st.sampled_from([2.0, 5.0]),
    data=st.data(),
)  # fmt: skip
def test_a_block_picture_fills_exactly_the_stored_blocks(rows, columns, cell, data):
    block = st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1))
    mask = data.draw(st.sets(block))
    filled = [("sparse", 1.0, sorted(mask))]
    picture = drawings.block_picture(rows, columns, filled, cell, "key", "A layout", "Some.")
    filled = set()
    for corners in paths(picture, "sparse"):
        (left, top), (right, bottom) = corners.min(axis=0) / cell, corners.max(axis=0) / cell
        assert bottom - top <= 1 + 1e-2
        filled |= {(int(top + 0.5 * (bottom - top)), c)
                   for c in range(int(left + 0.01), int(np.ceil(right - 0.01)))}  # fmt: skip
    assert filled == mask
    assert "Some." in picture


def test_figures_use_only_css_variables_for_colours():
    picture = drawings.loss_curves(HISTORIES, "tokens", "key")[0]
    picture += drawings.stacked_bars({"dense": {"a": 1.0}}, ["a"], {"dense": "$1$"}, "k", "Bars")
    picture += drawings.block_picture(
        2, 2, [("sparse", 0.5, [[0, 0]])], 5, "k2", "<Layout>", "One."
    )
    assert not re.search(r"#[0-9a-f]{6}\b", picture)
    assert "http" not in picture and "<style" not in picture and "&lt;Layout&gt;" in picture
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", picture))
    assert used <= set(svg.COLOUR)
    assert set(re.findall(r' id="(key|k|k2)-', picture)) == {"key", "k", "k2"}
