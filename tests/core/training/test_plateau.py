"""Plateau detection: counts stale evaluations, survives JSON, starts the next phase."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.training.phases import PLATEAU_GAIN as GAIN
from sparse_dataflow.core.training.phases import Phase, Plateau, with_next_start, with_starts

MODEL = ModelConfig(1, 8, 1, 8, 8, 8)


@given(st.lists(st.floats(0.5, 4), max_size=20))
def test_stale_counts_evaluations_since_the_last_gain(values):
    plateau = Plateau()
    for value in values:
        plateau = plateau.after(value)
    if values:
        best, since = math.inf, 0
        for value in values:
            since = 0 if value < best * (1 - GAIN) else since + 1
            best = value if since == 0 else best
        assert plateau == Plateau(best, since)
    assert Plateau.from_json(plateau.to_json()) == plateau
    assert Plateau.from_json(None) == Plateau()


def test_the_next_phase_starts_at_once_and_later_ones_stay():
    phases = tuple(Phase(a, b, MODEL, False) for a, b in ((0, 10), (10, 15), (15, 20)))
    sooner = with_next_start(phases, 0, 4)
    assert [(p.start, p.stop) for p in sooner] == [(0, 4), (4, 15), (15, 20)]
    assert with_starts(sooner, [0, 10, 15]) == phases
    with pytest.raises(ValueError, match="zip"):
        with_starts(phases, [0, 10])
