"""The line that compares a dense and a sparse model."""

import numpy as np
import pytest

from experiments.benchmarks import benchmark


@pytest.mark.parametrize(("ceiling", "above"), [(2.0, True), (8.0, False)])
def test_a_ratio_above_its_bound_names_a_busy_machine(ceiling, above, capsys):
    rows = {name: {"compile_seconds": 1.0} for name in ("dense", "sparse")}
    seconds = {"dense": np.full(3, 6.0), "sparse": np.ones(3)}
    benchmark.compared(rows, lambda row: "", seconds, "byte ceiling", ceiling)
    assert ("the machine is busy" in capsys.readouterr().out) == above
