"""Energy beside seconds: what a call takes, and what is printed where no counter is."""

import types

import numpy as np
import pytest

from experiments.benchmarks import benchmark, energy, joules
from experiments.benchmarks.chip_report import chip_page, chip_rows
from experiments.benchmarks.chip_report.chip_data import ChipFacts, ChipReport

SECONDS = {"dense": np.full(3, 4.0), "sparse": np.full(3, 2.0)}


@pytest.fixture
def power(monkeypatch):
    """power(WATTS) makes a clock and a counter, both moved by the list that it returns."""

    def install(watts):
        now = [0.0]

        def read(platform):
            return energy.Reading(
                "RAPL", {"package-0": int(1e6 * watts * now[0])}, {"package-0": 10**9}
            )

        monkeypatch.setattr(joules.energy, "read", read)
        monkeypatch.setattr(joules, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
        return now

    return install


@pytest.mark.parametrize(("seconds", "calls"), [(0.3, 7), (5.0, 1)])
def test_energy_is_that_of_calls_that_fill_the_measurement(power, seconds, calls):
    now, count = power(watts=50), []

    def run():
        count.append(1)
        now[0] += seconds
        return np.zeros(1)

    row = joules.measured(run, step=1, token=4)
    assert len(count) == calls
    assert row == pytest.approx({"step_joules": 50 * seconds, "token_joules": 50 * seconds / 4})


@pytest.mark.parametrize(
    "reading", [None, energy.Reading("RAPL", {"package-0": 7}, {"package-0": 9})]
)
def test_a_machine_without_moving_counters_has_no_joules(monkeypatch, reading):
    monkeypatch.setattr(joules.energy, "read", lambda platform: reading)
    monkeypatch.setattr(joules, "LEAST_SECONDS", 0.0)
    assert joules.measured(lambda: np.zeros(1), token=4) == {"token_joules": None}


def test_joules_are_printed_beside_seconds(capsys):
    rows = {
        name: {"compile_seconds": 1.0, "step_joules": 30.25, "token_joules": 0.5}
        for name in SECONDS
    }
    benchmark.compared(rows, lambda row: "2 ms", SECONDS, "FLOP ceiling", 6.0)
    printed = capsys.readouterr().out
    assert printed.count("2 ms  30.2 J a step, 0.5 J a token  compile") == 2
    assert "energy" not in printed


@pytest.mark.parametrize(("fields", "times"), [({"token_joules": None}, 1), ({}, 0)])
def test_missing_joules_are_said_once(capsys, fields, times):
    rows = {name: {"compile_seconds": 1.0, **fields} for name in SECONDS}
    benchmark.compared(rows, lambda row: "2 ms", SECONDS, "FLOP ceiling", 6.0)
    assert capsys.readouterr().out.count("not told") == times


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"step_joules": 30.0}, "2 ms (30 J a step)"), ({"step_joules": None}, "2 ms;")],
)
def test_a_chip_report_has_joules_and_their_source(fields, text):
    rows = {name: {"step_ms": 2.0, **fields} for name in SECONDS}
    result = {"rows": rows, "batch": 1, "dtype": "float32", "block": 64, "flop_ceiling": 5.0}
    ratio = {"ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
    (measure,) = chip_rows.paired("step", "step_ms", "flop_ceiling")(result | ratio)
    assert text in measure.text
    for facts in (ChipFacts("a", "cpu", 8), ChipFacts("a", "cpu", 8, energy="RAPL")):
        page = chip_page.render(ChipReport(facts, "13b", 0.125, "command", "date", {"jax": "1"}))
        assert page.count(f"energy: {facts.energy}") == 1
