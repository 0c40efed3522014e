"""Depth schedules: deterministic by seed and step, within bounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.core.config.depth import GROWN_AT, DepthSchedule
from sparse_dataflow.files.errors import UserError


@given(
    st.sampled_from(["constant", "drop:0.9", "drop:0.1", "grow:0.25", "grow:0.9"]),
    st.integers(1, 40),
    st.integers(1, 50),
    st.integers(0, 5),
)
def test_active_blocks_ascend_within_the_model(text, layers, steps, seed):
    schedule = DepthSchedule.parse(text)
    for step in range(steps):
        active = schedule.active(layers, step, steps, seed)
        assert active == schedule.active(layers, step, steps, seed)
        assert list(active) == sorted(set(active)) and 1 <= len(active) <= layers
        assert active[0] >= 0 and active[-1] < layers


@given(st.integers(1, 40), st.integers(1, 60))
def test_a_growing_network_grows_to_full_depth(layers, steps):
    schedule = DepthSchedule.parse("grow:0.25")
    depths = [len(schedule.active(layers, step, steps, 0)) for step in range(steps)]
    assert depths == sorted(depths) and depths[0] == schedule.starting_blocks(layers)
    if steps > 1:
        late = [d for step, d in enumerate(depths) if step >= GROWN_AT * steps]
        assert set(late) == {layers}


def test_blocks_are_dropped_with_the_given_probability():
    schedule = DepthSchedule.parse("drop:0.2")
    counts = [len(schedule.active(50, step, 200, 3)) for step in range(200)]
    assert np.mean(counts) == pytest.approx(40, abs=1)
    assert schedule.active(50, 0, 200, 3) != schedule.active(50, 0, 200, 4)


@pytest.mark.parametrize("text", ["", "drop", "drop:", "drop:1", "grow:0", "grow:x", "shrink:0.5"])
def test_illegal_texts_are_refused_with_the_legal_ones(text):
    with pytest.raises(UserError, match=r"legal: constant, drop:P .* grow:F"):
        DepthSchedule.parse(text)
