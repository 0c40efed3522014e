"""Goodput: categories add up to the run's time over crashes, stops and clock changes."""

import itertools
import json
import math

from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.core.training.clock import Clock
from sparse_dataflow.monitoring import goodput

ACTIVITIES = ("start", "compile", "step", "evolution", "data", "checkpoint", "evaluation")
SECONDS = st.floats(0, 1e4)


@st.composite
def attempts(draw):
    """Rows of some attempts, with random gaps between them."""
    rows, now = [], draw(st.floats(0, 1e6))
    for number in range(1, 1 + draw(st.integers(1, 4))):
        seconds = draw(st.dictionaries(st.sampled_from(ACTIVITIES), SECONDS))
        elapsed = sum(seconds.values())
        ended = draw(st.booleans())
        row = {"attempt": number, "began": now, "elapsed": elapsed}
        rows.append({**row, "seconds": seconds, "ended": ended})
        now += elapsed + draw(SECONDS)
    return rows


@given(attempts(), st.floats(0, 1))
def test_categories_add_up_to_all_time_but_gaps_after_regular_ends(rows, fraction):
    stepped = sum(row["seconds"].get(p, 0.0) for row in rows for p in goodput.TRAINING)
    totals = goodput.seconds_by_category(rows, fraction * stepped)
    assert tuple(totals) == goodput.CATEGORIES and min(totals.values()) >= 0
    gaps = sum(
        after["began"] - before["began"] - before["elapsed"]
        for before, after in itertools.pairwise(rows)
        if not before["ended"]
    )
    total = sum(row["elapsed"] for row in rows) + gaps
    assert math.isclose(sum(totals.values()), total, rel_tol=1e-6, abs_tol=1e-2)
    assert math.isclose(totals["productive"], fraction * stepped, abs_tol=1e-6)
    assert totals["lost"] >= (1 - fraction) * stepped - 1e-6
    assert 0 <= goodput.goodput_share(totals) <= 1


@given(attempts(), st.floats(-1e9, 1e9))
def test_clock_changes_between_attempts_make_nothing_negative(rows, jump):
    for row in rows[1:]:
        row["began"] += jump
    totals = goodput.seconds_by_category(rows, 0.0)
    assert min(totals.values()) >= 0 and all(map(math.isfinite, totals.values()))


class Time:
    now = 0.0

    def __call__(self):
        return self.now


def goodput_log(folder, **seconds):
    """Returns the log of a process that spent these seconds by activity."""
    time = Time()
    clock = Clock(time)
    for activity, duration in seconds.items():
        with clock.during(activity):
            time.now += duration
    return goodput.GoodputLog(folder, clock)


def test_attempts_add_up_and_an_incomplete_row_is_skipped(tmp_path):
    first = goodput_log(tmp_path, compile=10, step=30)
    first.write()
    first.write(ended=True)
    with (tmp_path / goodput.NAME).open("a") as file:
        file.write('\n{"attempt": 1, "began": 5, "elap')
    second = goodput_log(tmp_path, compile=1, step=20, data=4)
    totals = second.seconds(productive=45)
    assert [round(totals[name]) for name in ("productive", "compile", "data", "lost")] == [
        45,
        11,
        4,
        5,
    ]
    assert goodput.summary(totals).startswith("goodput 69%: productive 45.0 s, compile 11.0 s, ")
    second.write()
    rows = goodput.read(tmp_path / goodput.NAME)
    assert [(row["attempt"], row["ended"]) for row in rows] == [(1, True), (2, False)]


@given(st.binary(max_size=60) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["attempt", "began", "elapsed", "seconds", "ended"]), inner
    ),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_content_of_the_file_is_read_or_skipped(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / goodput.NAME
    path.write_bytes(content)
    totals = goodput.seconds_by_category(goodput.read(path), 1.0)
    assert all(map(math.isfinite, totals.values()))
