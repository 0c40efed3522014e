"""A training with a budget of seconds ends there, and its schedule with it."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import some
from test_loop import TRAINING, trainer

from sparse_dataflow.core.optim.optimizers import learning_rate_schedule
from sparse_dataflow.core.training import loop
from sparse_dataflow.core.training.length import Length
from sparse_dataflow.monitoring.metrics import read_metrics
from sparse_dataflow.monitoring.time_budget import TimeBudget

LONG = dataclasses.replace(TRAINING, steps=200, warmup=0.1)


@st.composite
def lengths(draw):
    length = Length(draw(st.integers(1, 300)))
    step = 0
    for _ in range(draw(st.integers(0, 5))):
        if step + 1 >= length.total:
            break
        step = draw(st.integers(step + 1, length.total - 1))
        length = length.revised(step, draw(st.integers(step, 400)))
    return length


@given(lengths())
def test_the_schedule_rises_from_its_start_to_its_end_whatever_was_revised(length):
    points = [length.schedule_step(step) for step in range(length.total + 1)]
    assert points[0] == 0 and points == sorted(points)
    if length.total > (length.revisions or [(0, 0)])[-1][0]:
        assert points[-1] == pytest.approx(length.planned)
    assert Length.from_json(length.planned, [list(pair) for pair in length.revisions]) == length


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_without_a_revision_steps_are_what_was_planned(planned, step):
    assert Length(planned).total == planned
    assert type(Length(planned).schedule_step(step)) is int
    assert Length(planned).schedule_step(step) == step


@pytest.mark.parametrize("saved", [[[3, 2]], [[5, 9], [4, 9]], [[1.5, 3]], [[0, 3]], [[True, 3]]])
def test_revisions_of_a_damaged_checkpoint_are_refused(saved):
    with pytest.raises((ValueError, TypeError)):
        Length.from_json(10, saved)


class Machine:
    """A clock that goes on by `seconds(step)` with each step."""

    def __init__(self, seconds):
        self.now, self.calls, self.seconds = 0.0, 0, seconds

    def perf_counter(self):
        self.calls += 1
        if self.calls % 2 == 0:  # A step asks before and after.
            self.now += self.seconds(self.calls // 2)
        return self.now


SPEEDS = {
    "as planned": lambda step: 1.0,
    "one per cent slower": lambda step: 1.005,
    "half as fast from the start": lambda step: 2.0,
    "three times as fast": lambda step: 0.33,
    "busy in the middle": lambda step: 3.0 if 60 < step < 90 else 1.0,
    "busy at the end": lambda step: 2.5 if step > 150 else 1.0,
    "a slow first step": lambda step: 40.0 if step == 1 else 1.0,
}


def run(folder, speed, monkeypatch, budget=200.0):
    machine = Machine(speed)
    monkeypatch.setattr(loop.time, "perf_counter", machine.perf_counter)
    rarely = {"eval_every": 10**6, "checkpoint_every": 10**6}
    return trainer(folder, training=LONG, budget=TimeBudget(budget), **rarely)


@pytest.mark.parametrize("name", some([*SPEEDS], "three times as fast", "busy in the middle"))
def test_a_training_ends_at_its_seconds_however_fast_the_machine_is(name, tmp_path, monkeypatch):
    made = run(tmp_path, SPEEDS[name], monkeypatch)
    while not made.finished:
        made.advance()
    assert made.seconds == pytest.approx(200, rel=0.05)
    rates = [
        r["learning_rate"]
        for r in read_metrics(tmp_path / "metrics.jsonl")
        if "loss" in r and r["kind"] == "train"
    ]
    peak = max(rates)
    planned = learning_rate_schedule(LONG)
    assert peak == pytest.approx(LONG.learning_rate, rel=0.05)
    assert rates[-1] == pytest.approx(planned(199), rel=0.6) and rates[-1] < peak / 4
    if name in ("as planned", "one per cent slower"):
        assert made.step == 200 and rates == [planned(step) for step in range(200)]


def test_a_resumed_training_knows_what_was_revised(tmp_path, monkeypatch):
    made = run(tmp_path, SPEEDS["half as fast from the start"], monkeypatch)
    while made.step < 50:
        made.advance()
    made.save_and_wait()
    made.close()
    again = run(tmp_path, SPEEDS["half as fast from the start"], monkeypatch)
    assert again.step == 50 and again.length == made.length and again.length.revisions
    assert again.phases == made.phases
    while not again.finished:
        again.advance()
    assert again.seconds == pytest.approx(200, rel=0.05)
    again.save_and_wait()
    again.close()
    done = run(tmp_path, SPEEDS["as planned"], monkeypatch)
    assert done.finished and done.step == again.step


def test_models_side_by_side_get_equal_seconds(tmp_path, monkeypatch):
    """Beside a process that begins after the plan was made."""
    speeds = {"a": lambda step: 1.3, "b": lambda step: 2.1}
    trainers = [run(tmp_path / name, speed, monkeypatch) for name, speed in speeds.items()]
    machines = [Machine(speed) for speed in speeds.values()]
    for _ in range(2000):
        running = [i for i, t in enumerate(trainers) if not t.finished]
        if not running:
            break
        chosen = min(running, key=lambda i: trainers[i].progress)
        monkeypatch.setattr(loop.time, "perf_counter", machines[chosen].perf_counter)
        trainers[chosen].advance()
    for made in trainers:
        made.close()
    assert [t.seconds for t in trainers] == [pytest.approx(200, rel=0.03)] * 2
