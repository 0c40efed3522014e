"""Where an evaluation curve reaches a loss, and what a training needs until then."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.runs.studies.time_to_quality import crossing, effort

CURVE = np.array([[100, 4.0], [200, 3.0], [300, 2.5], [400, 2.6]])


@pytest.mark.parametrize(
    ("target", "tokens"),
    [(5.0, 100), (4.0, 100), (3.5, 150), (3.0, 200), (2.6, 280), (2.5, 300), (2.4, None)],
)
def test_a_curve_is_interpolated_between_evaluations(target, tokens):
    assert crossing(CURVE, target) == (tokens if tokens is None else pytest.approx(tokens))


@given(
    st.lists(st.floats(0.5, 5), min_size=2, max_size=20, unique=True),
    st.floats(0, 1),
    st.integers(1, 1000),
)
def test_a_falling_curve_crosses_where_interpolation_gives_the_target(losses, share, spacing):
    bits = np.sort(losses)[::-1]
    tokens = spacing * np.arange(1, len(bits) + 1)
    target = bits[-1] + share * (bits[0] - bits[-1])
    at = crossing(np.column_stack([tokens, bits]), target)
    assert np.interp(at, tokens, bits) == pytest.approx(target, rel=1e-6)


def test_an_effort_is_the_mean_over_seeds_at_the_speed_of_the_median_step():
    half = {"steps": 40, "tokens": 400, "flops": 4e6}
    results = [
        {**half, "curve": CURVE + np.array([0, shift]), "step_seconds": seconds}
        for shift, seconds in ((-0.25, 2.0), (0.25, 3.0), (0, 2.5))
    ]
    needed = effort(results, 3.5)
    assert needed.tokens == pytest.approx(150)
    assert needed.flops == pytest.approx(1.5e6) and needed.seconds == pytest.approx(15 * 2.5)
    assert effort(results, 1.0) is None
