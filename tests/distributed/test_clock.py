"""Seconds by phase: they add up, whatever is nested in what."""

import math

from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.distributed.clock import START, Clock


class Time:
    now = 0.0

    def __call__(self):
        return self.now


TREES = st.recursive(
    st.floats(0, 100),
    lambda inner: st.lists(st.tuples(st.sampled_from(["data", "step"]), inner), max_size=3),
    max_leaves=12,
)


def walk(clock, time, tree, phase, expected):
    """Spends the times of a tree, (phase, subtree) or seconds, and notes them in `expected`."""
    if isinstance(tree, float):
        time.now += tree
        expected[phase] = expected.get(phase, 0.0) + tree
        return
    for name, inner in tree:
        with clock.during(name):
            assert clock.phase == name
            walk(clock, time, inner, name, expected)
        assert clock.phase == phase


@given(TREES)
def test_the_innermost_phase_has_the_time_and_all_of_it_is_had(tree):
    time, expected = Time(), {}
    clock = Clock(time)
    walk(clock, time, tree, START, expected)
    spent = clock.spent()
    assert math.isclose(sum(spent.values()), clock.elapsed, abs_tol=1e-6)
    for phase, seconds in expected.items():
        assert math.isclose(spent[phase], seconds, abs_tol=1e-6)


def test_progress_stands_still_inside_a_phase_only():
    clock, seen = Clock(), []
    for phase in ("data", "step", "data"):
        with clock.during(phase):
            seen += [clock.progress, clock.progress]
    assert seen[::2] == seen[1::2] and seen[::2] == sorted(set(seen))


def test_the_usual_step_is_the_longest_of_the_last_ones():
    clock = Clock()
    assert clock.usual_step == 0
    for seconds in (9.0, *[1.0] * 30, 2.0, *[1.0] * 30):
        clock.stepped(seconds)
    assert clock.usual_step == 2.0
