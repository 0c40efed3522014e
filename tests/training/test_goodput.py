"""Where a run's time went: categories that add up, over crashes, stops and clocks that jump."""

import itertools
import json
import math

from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.distributed.clock import Clock
from sparse_dataflow.training import goodput

PHASES = ("start", "compile", "step", "evolution", "data", "checkpoint", "evaluation")
SECONDS = st.floats(0, 1e4)


@st.composite
def attempts(draw):
    """Rows of some attempts, and the hours between them that no crash explains."""
    rows, now = [], draw(st.floats(0, 1e6))
    for number in range(1, 1 + draw(st.integers(1, 4))):
        seconds = draw(st.dictionaries(st.sampled_from(PHASES), SECONDS))
        elapsed = sum(seconds.values())
        ended = draw(st.booleans())
        row = {"attempt": number, "began": now, "elapsed": elapsed}
        rows.append({**row, "seconds": seconds, "ended": ended})
        now += elapsed + draw(SECONDS)
    return rows


@given(attempts(), st.floats(0, 1))
def test_the_categories_are_the_whole_time_less_that_between_orderly_starts(rows, part):
    stepped = sum(row["seconds"].get(p, 0.0) for row in rows for p in goodput.STEPS)
    found = goodput.account(rows, part * stepped)
    assert tuple(found) == goodput.CATEGORIES and min(found.values()) >= 0
    gaps = sum(
        after["began"] - before["began"] - before["elapsed"]
        for before, after in itertools.pairwise(rows)
        if not before["ended"]
    )
    total = sum(row["elapsed"] for row in rows) + gaps
    assert math.isclose(sum(found.values()), total, rel_tol=1e-6, abs_tol=1e-2)
    assert math.isclose(found["productive"], part * stepped, abs_tol=1e-6)
    assert found["lost"] >= (1 - part) * stepped - 1e-6
    assert 0 <= goodput.share(found) <= 1


@given(attempts(), st.floats(-1e9, 1e9))
def test_a_clock_that_jumps_between_attempts_makes_nothing_negative(rows, jump):
    for row in rows[1:]:
        row["began"] += jump
    found = goodput.account(rows, 0.0)
    assert min(found.values()) >= 0 and all(map(math.isfinite, found.values()))


class Time:
    now = 0.0

    def __call__(self):
        return self.now


def ledger(folder, **seconds):
    """A ledger whose process has spent so much."""
    time = Time()
    clock = Clock(time)
    for phase, some in seconds.items():
        with clock.during(phase):
            time.now += some
    return goodput.Ledger(folder, clock)


def test_attempts_add_up_and_a_torn_row_is_passed_over(tmp_path):
    first = ledger(tmp_path, compile=10, step=30)
    first.note()
    first.note(ended=True)
    with (tmp_path / goodput.NAME).open("a") as file:
        file.write('\n{"attempt": 1, "began": 5, "elap')
    second = ledger(tmp_path, compile=1, step=20, data=4)
    found = second.seconds(kept=45)
    assert [round(found[name]) for name in ("productive", "compile", "data", "lost")] == [
        45,
        11,
        4,
        5,
    ]
    assert goodput.told(found).startswith("goodput 69%: productive 45.0 s, compile 11.0 s, ")
    second.note()
    rows = goodput.read(tmp_path / goodput.NAME)
    assert [(row["attempt"], row["ended"]) for row in rows] == [(1, True), (2, False)]


@given(st.binary(max_size=60) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["attempt", "began", "elapsed", "seconds", "ended"]), inner
    ),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_whatever_stands_in_the_file_is_read_or_passed_over(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / goodput.NAME
    path.write_bytes(content)
    found = goodput.account(goodput.read(path), 1.0)
    assert all(map(math.isfinite, found.values()))
