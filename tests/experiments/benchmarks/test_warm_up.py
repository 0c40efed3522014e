"""Number of warm-up runs, with simulated page counts."""

import pytest

from experiments.benchmarks import warm_up


@pytest.mark.parametrize(
    "grown, min_runs, runs",
    [((), 1, 1), ((), 2, 2), ((10**6, 10**6, 10**6, 9), 2, 4), ((10**6,) * 99, 1, 8)],
)
def test_it_runs_until_the_process_stops_growing(monkeypatch, grown, min_runs, runs):
    calls = []
    monkeypatch.setattr(warm_up, "_pages_touched", lambda: sum(grown[: len(calls)]))
    assert warm_up.warm_up(lambda: calls.append(1) or len(calls), min_runs) == runs == len(calls)


def test_processes_that_step_together_warm_up_together(monkeypatch):
    calls, others = [], iter([True, True, False])
    monkeypatch.setattr(warm_up, "_pages_touched", lambda: 0)
    monkeypatch.setattr(warm_up.collectives, "any_process", lambda mine: mine or next(others))
    warm_up.warm_up(lambda: calls.append(1))
    assert len(calls) == 3
