"""Paired timing by a clock of the test's own, and results that say what made them."""

import datetime
import json
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from experiments.benchmarks import benchmark, paired, warm_up
from sparse_dataflow.commands import measurement

positive = hnp.arrays(float, 7, elements=st.floats(1e-3, 1e3))


@pytest.fixture
def still(monkeypatch):
    """A process that does not grow."""
    monkeypatch.setattr(warm_up, "_pages_touched", lambda: 0)


def test_runs_are_timed_in_turn_after_two_rounds_of_warming_up(monkeypatch, still):
    now, order = 0.0, []

    def take(name, seconds):
        def run():
            nonlocal now
            order.append(name)
            now += seconds * len(order)
            return np.zeros(1)

        return run

    clock = types.SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr(paired, "time", clock)
    times = paired.paired_seconds({"dense": take("dense", 2), "sparse": take("sparse", 1)}, 3)
    assert order == ["dense", "sparse"] * 5
    np.testing.assert_allclose(times["dense"], [2 * 5, 2 * 7, 2 * 9])
    np.testing.assert_allclose(times["sparse"], [6, 8, 10])


def test_a_short_run_is_started_again_until_the_time_is_enough(monkeypatch, still):
    now, calls = 0.0, []

    def run():
        nonlocal now
        calls.append(now)
        now += 0.25
        return np.zeros(1)

    monkeypatch.setattr(paired, "time", types.SimpleNamespace(perf_counter=lambda: now))
    times = paired.paired_seconds({"short": run}, 3, enough=0.9)
    assert len(calls) == 2 + 3 * 4
    np.testing.assert_allclose(times["short"], 0.25)


@given(positive, positive)
def test_the_ratio_is_taken_round_by_round(sparse, slowness):
    ratio = paired.paired_ratio(3 * sparse * slowness, sparse * slowness)
    assert tuple(ratio.values()) == pytest.approx((3, 3, 3))
    ratio = paired.paired_ratio(slowness, sparse, "share")
    assert ratio["share_low"] <= ratio["share"] <= ratio["share_high"]
    assert ratio["share"] == pytest.approx(np.median(slowness / sparse))


def test_provenance_is_enough_to_repeat_it(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/a/clone/experiments/step_bench.py", "--keep=my results"])
    found = measurement.provenance("abacus")
    assert found["command"] == "python -m experiments.step_bench '--keep=my results'"
    assert found["machine"] == "abacus"
    assert {"python", "jax", "jaxlib", "flax"} <= found["versions"].keys()
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(found["date"])
    assert datetime.timedelta(0) <= age < datetime.timedelta(hours=1)


def test_a_result_is_kept_under_a_plain_name(tmp_path):
    folder, name = tmp_path / "new" / "folder", "step_Intel(R) X, 2 GHz!"
    path = measurement.keep(str(folder), name, "abacus", [{"a": [1]}])
    assert path == folder / "step_intel-r-x-2-ghz.json"
    kept = json.loads(path.read_text())
    assert (kept["a"], kept["machine"]) == ([1], "abacus")


def test_a_speedup_is_told_beside_its_ceiling(capsys):
    seconds = {"dense": np.asarray([4.0, 6.0, 8.0]), "sparse": np.asarray([2.0, 2.0, 2.0])}
    rows = {name: {"compile_seconds": 1.0} for name in seconds}
    found = benchmark.compared(rows, str, seconds, "FLOP ceiling", 6.0)
    assert found == {"ratio": 3.0, "ratio_low": 2.5, "ratio_high": 3.5, "rows": rows}
    said = "dense / sparse: 3.00x (quartiles 2.50-3.50); FLOP ceiling 6.00x, reached 50%"
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_no_folder_keeps_nothing(capsys):
    assert measurement.keep("", "step", "abacus", [{}]) is None
    assert not capsys.readouterr().out
