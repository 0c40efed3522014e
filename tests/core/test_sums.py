"""A mean is a sum over a count, and its error does not depend on how items are in batches."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.core import sums


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=30))
def test_the_error_of_equal_parts_is_the_usual_one(values):
    mean = sums.mean(values)
    assert mean.value == pytest.approx(np.mean(values), abs=1e-12)
    usual = np.std(values, ddof=1) / math.sqrt(len(values))
    assert mean.error == pytest.approx(usual, rel=1e-9, abs=1e-12)


@given(st.lists(st.integers(1, 40), min_size=8, max_size=40), st.integers(0, 99))
def test_parts_of_one_mean_have_no_error_whatever_their_sizes(counts, seed):
    rate = np.random.default_rng(seed).normal()
    mean = sums.mean([rate * count for count in counts], counts)
    assert mean.value == pytest.approx(rate) and mean.error == pytest.approx(0, abs=1e-12)
    assert mean.groups == len(counts)


@pytest.mark.parametrize("batch", [2, 8, 50])
def test_batches_whose_last_one_is_smaller_have_about_the_error_of_items(batch):
    items = np.random.default_rng(batch).normal(4.0, 1.0, 401)
    batches = [items[start : start + batch] for start in range(0, len(items), batch)]
    mean = sums.mean([each.sum() for each in batches], list(map(len, batches)))
    assert mean.value == pytest.approx(items.mean())
    assert 0.4 < mean.error / sums.mean(items).error < 2.5


def test_what_cannot_be_known_is_not_said():
    assert sums.mean([3.0]).error is None and sums.mean([3.0, 0.0], [1, 0]).error is None
    assert math.isnan(sums.mean([]).value)
    assert sums.half_range_text([1.0]) == "-" and sums.half_range_text([1.0, 2.0]) == "0.5000"
    assert sums.error_text([1.0], ".2%") == "" and sums.error_text([1.0, 1.0], ".1f") == " ± 0.0"


SPREADS = {"std", "var", "nanstd", "nanvar", "stdev", "pstdev", "variance", "pvariance", "sem"}
OTHERS = {
    "sparse_dataflow/core/optim/loss_spikes.py": "a spread of losses, which is no error of a mean",
    "sparse_dataflow/planner/bands.py": "the share of a variance that settings explain",
    "experiments/benchmarks/pruning_memory.py": "drawn weights of the same scale",
}
"""File -> why it computes a spread of its own."""


def test_no_other_file_computes_the_spread_of_a_mean():
    """Errors of means and second moments have one home: this file, and `pruning.moments`."""
    root = Path(sums.__file__).parents[2]
    found = {
        str(path.relative_to(root))
        for package in ("sparse_dataflow", "experiments")
        for path in (root / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in SPREADS
    }
    assert found == {*OTHERS}
