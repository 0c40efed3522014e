"""The time left covers steps, evaluations and checkpoints of all models, and the report."""

import json
import pathlib
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.files import output
from sparse_dataflow.monitoring import time_left as progress_module
from sparse_dataflow.monitoring.time_left import Progress, Remaining, TimeLeft, in_words

REPORT = 20.0


class SimulatedRun:
    """Models that take turns on a simulated clock."""

    def __init__(self, steps, evaluation, save=0.5, every=8, final=6.0, slowdown=lambda time: 1.0):
        """Args:
        steps: name -> seconds of each step on a quiet machine.
        evaluation: seconds of a periodic evaluation over those of a mean step.
        save: seconds of a checkpoint.
        every: evaluations a run; half as many checkpoints.
        final: batches of the last evaluation over those of a periodic one.
        slowdown: simulated time -> seconds of all work over those on a quiet machine.
        """
        self.seconds = {"step": 0.0}
        self.steps, self.evaluation, self.save, self.final = steps, evaluation, save, final
        self.slowdown = slowdown
        self.mean = {name: float(np.mean(values)) for name, values in steps.items()}
        self.every = {name: max(1, len(values) // every) for name, values in steps.items()}

    def spend(self, activity, seconds):
        seconds *= self.slowdown(self.now)
        self.seconds[activity] = self.seconds.get(activity, 0.0) + seconds

    @property
    def now(self):
        return sum(self.seconds.values())

    def run(self, time_left):
        """Yields (simulated time, estimate) every few seconds and after each last evaluation."""
        time_left.begin()
        done, shown = dict.fromkeys(self.steps, 0), 0.0
        while any(done[name] < len(s) for name, s in self.steps.items()):
            name = min(done, key=lambda n: done[n] / len(self.steps[n]))
            self.spend("step", self.steps[name][done[name]])
            done[name] += 1
            step, steps, every = done[name], len(self.steps[name]), self.every[name]
            if step % every == 0 or step == steps:
                self.spend("evaluation", self.evaluation * self.mean[name])
            if step % (2 * every) == 0 or step == steps:
                self.spend("checkpoint", self.save)
            left = lambda n: 0 if step == steps else steps // n - step // n + bool(steps % n)  # noqa: B023, E731
            rest = Remaining(0, steps - step, (), left(every), left(2 * every), 10,
                             round(10 * self.final))  # fmt: skip
            time_left.after_step(name, rest)
            if self.now - shown > 3.0:
                shown = self.now
                yield self.now, time_left.seconds()
        for name in self.steps:
            self.spend("evaluation", self.final * self.evaluation * self.mean[name])
            time_left.evaluated(name)
            yield self.now, time_left.seconds()


def estimates(run, report=REPORT):
    """Returns [(time, estimated seconds left, true ones)] of a simulated run."""

    def predicted_seconds(name, step):
        return report / len(run.steps) * step / run.mean[name]

    rows = list(run.run(TimeLeft(lambda: run.seconds, predicted_seconds)))
    end = run.now + report * run.slowdown(run.now)
    return [(time, estimate, end - time) for time, estimate in rows]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.floats(0.05, 2.0), min_size=1, max_size=3),
    st.integers(60, 300),
    st.floats(2.5, 6.0),  # A held-out sequence takes 0.25 to 0.6 of a training sequence.
    st.integers(0, 2**31),
)
def test_from_the_second_minute_on_it_is_within_a_fifth(step_seconds, most, evaluation, seed):
    rng = np.random.default_rng(seed)
    steps = {
        str(i): mean * rng.uniform(0.8, 1.2, round(most * min(step_seconds) / mean) + 40)
        for i, mean in enumerate(step_seconds)
    }
    rows = [row for row in estimates(SimulatedRun(steps, evaluation)) if row[0] > 60]
    # Within a fifth, and within a step and an evaluation near the end.
    slack = (evaluation + 3) * max(step_seconds)
    assert all(abs(est - true) <= 0.2 * true + slack for _, est, true in rows)


def test_checkpoints_that_take_long_are_a_part_of_the_time_left():
    run = SimulatedRun({"one": np.ones(200)}, 0.1, save=25.0)
    rows = [row for row in estimates(run) if row[0] > 80]  # After the first checkpoint.
    assert all(abs(estimate - true) <= 0.1 * true + 3 for _, estimate, true in rows)


def drawn_steps(step_seconds, total, rng):
    """Steps of models that share `total` seconds, each step within a fifth of its mean."""
    share = total / len(step_seconds)
    return {
        str(i): mean * rng.uniform(0.8, 1.2, max(12, round(share / mean)))
        for i, mean in enumerate(step_seconds)
    }


several = st.lists(st.floats(0.2, 3.0), min_size=1, max_size=3)
costs = st.floats(1.0, 6.0)  # Of an evaluation, in steps.


@settings(deadline=None, max_examples=30)
@given(several, costs, st.floats(-0.25, 0.25), st.integers(0, 2**31))
def test_it_follows_a_speed_that_drifts(step_seconds, evaluation, drift, seed):
    steps = drawn_steps(step_seconds, 400.0, np.random.default_rng(seed))
    run = SimulatedRun(steps, evaluation, slowdown=lambda time: 1.0 + drift * min(1.0, time / 500))
    slack = (evaluation + 3) * max(step_seconds)
    rows = [row for row in estimates(run) if row[0] > 60]
    assert all(abs(est - true) <= 0.2 * true + slack for _, est, true in rows)


@settings(deadline=None, max_examples=30)
@given(several, costs, st.sampled_from([0.5, 2.0]), st.integers(0, 2**31))
def test_a_new_speed_is_known_once_it_has_lasted(step_seconds, evaluation, factor, seed):
    """As when another program begins or ends: as long as the time left, and a minute."""
    steps = drawn_steps(step_seconds, 900.0, np.random.default_rng(seed))
    change = 200.0
    run = SimulatedRun(steps, evaluation, slowdown=lambda time: 1.0 if time < change else factor)
    slack = (evaluation + 3) * max(step_seconds) * max(1.0, factor)
    rows = [row for row in estimates(run) if row[0] - change > max(60, row[2]) + slack]
    assert len(rows) > 10
    assert all(abs(est - true) <= 0.2 * true + slack for _, est, true in rows)


def test_models_share_the_speed_of_the_machine():
    """A model whose steps are minutes apart follows the quick steps of another."""
    clock = {"step": 0.0}
    left = TimeLeft(lambda: clock)
    left.begin()
    for turn in range(20):
        slow = 1.0 if turn < 10 else 2.0
        for _ in range(20):
            clock["step"] += 1.0 * slow
            left.after_step("quick", Remaining(0, 0))
        if turn < 10:
            clock["step"] += 50.0
            left.after_step("rare", Remaining(0, 4))
    assert left.seconds() == pytest.approx(4 * 50.0 * 2.0, rel=0.35)


def test_a_recorded_run_is_estimated_within_a_fifth():
    """The step times of a `make demo --minutes=1` on two quiet cores, of three models."""
    recorded = json.loads((pathlib.Path(__file__).parent / "recorded_run.json").read_text())
    run = SimulatedRun(
        {n: np.array(m["steps"]) for n, m in recorded["models"].items()},
        recorded["evaluation"], final=recorded["final"],
    )  # fmt: skip
    rows = [row for row in estimates(run, recorded["report"]) if row[0] > 60]
    assert len(rows) > 50
    for time, estimate, true in rows:
        assert estimate == pytest.approx(true, rel=0.2), time


def test_a_finished_run_that_is_resumed_has_no_step_left():
    left = TimeLeft(lambda: {"step": 1.0})
    left.begin()
    left.evaluated("sparse")
    assert left.seconds() == 0


def test_a_later_phase_counts_by_its_flops():
    clock = {"step": 0.0}
    left = TimeLeft(lambda: clock)
    left.begin()
    for step in range(1, 11):
        clock["step"] += 1.0
        left.after_step("sparse", Remaining(0, 10 - step, ((10, 1 / 4),)))
    assert left.seconds() == pytest.approx(10 * 0.25**0.6)


@pytest.mark.parametrize(
    "seconds, text",
    [(0.4, "0 s"), (45, "45 s"), (99, "99 s"), (270, "4 min 30 s"), (300, "5 min"),
     (596, "10 min"), (12 * 60, "12 min"), (12_000, "3 h 20 min"), (7200, "2 h"),
     (3 * 86400, "3.0 days")],
)  # fmt: skip
def test_durations_are_short(seconds, text):
    assert in_words(seconds) == text


@pytest.fixture
def lines(monkeypatch):
    said = []
    monkeypatch.setattr(progress_module, "say", said.append)
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 0.0)
    return said


def shown(terminal, monkeypatch, capsys=None):
    class Stream:
        text = ""

        def write(self, text):
            self.text += text

        def flush(self):
            pass

        def isatty(self):
            return terminal

    stream = Stream()
    monkeypatch.setattr("sys.stderr", stream)
    clock = {"step": 0.0}
    progress = Progress(TimeLeft(lambda: clock))
    for step in range(1, 4):
        clock["step"] += 1
        progress._last = float("-inf")
        progress.note("sparse", step, 3, {"step": step, "loss": 2.0})
        progress.after_step("sparse", Remaining(0, 3 - step))
    progress.stage("writing the report")
    progress.close()
    return stream.text


def test_a_log_has_plain_lines(lines, monkeypatch):
    shown(False, monkeypatch)
    assert len(lines) == 4 and not any("\r" in line for line in lines)
    assert re.fullmatch(r" *\d+% · 2 s left · sparse 1/3 loss 2\.000", lines[0])
    assert lines[-1] == "all steps are done · 0 s left · writing the report"


def test_a_terminal_has_one_line_that_changes(lines, monkeypatch):
    text = shown(True, monkeypatch)
    assert not lines and text.count("\n") == 1 and text.count("\r") > 3


def test_quiet_shows_neither(monkeypatch):
    level = output.LOGGER.level
    try:
        output.be_quiet()
        assert shown(True, monkeypatch) == shown(False, monkeypatch) == ""
    finally:
        output.LOGGER.setLevel(level)
