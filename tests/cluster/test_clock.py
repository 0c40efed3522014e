"""Seconds per activity: they add up, however activities are nested."""

import math

from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.core.training.clock import START, Clock


class Time:
    now = 0.0

    def __call__(self):
        return self.now


TREES = st.recursive(
    st.floats(0, 100),
    lambda inner: st.lists(st.tuples(st.sampled_from(["data", "step"]), inner), max_size=3),
    max_leaves=12,
)


def walk(clock, time, tree, activity, expected):
    """Spends the times of a tree, (activity, subtree) or seconds; adds them to `expected`."""
    if isinstance(tree, float):
        time.now += tree
        expected[activity] = expected.get(activity, 0.0) + tree
        return
    for name, inner in tree:
        with clock.during(name):
            assert clock.activity == name
            walk(clock, time, inner, name, expected)
        assert clock.activity == activity


@given(TREES)
def test_time_counts_for_the_innermost_activity_and_sums_to_elapsed(tree):
    time, expected = Time(), {}
    clock = Clock(time)
    walk(clock, time, tree, START, expected)
    totals = clock.seconds_by_activity()
    assert math.isclose(sum(totals.values()), clock.elapsed, abs_tol=1e-6)
    for activity, seconds in expected.items():
        assert math.isclose(totals[activity], seconds, abs_tol=1e-6)


def test_progress_changes_with_the_activity_only():
    clock, seen = Clock(), []
    for activity in ("data", "step", "data"):
        with clock.during(activity):
            seen += [clock.progress, clock.progress]
    assert seen[::2] == seen[1::2] and seen[::2] == sorted(set(seen))


def test_longest_step_covers_recent_steps_only():
    clock = Clock()
    assert clock.longest_step == 0
    for seconds in (9.0, *[1.0] * 30, 2.0, *[1.0] * 30):
        clock.record_step(seconds)
    assert clock.longest_step == 2.0
