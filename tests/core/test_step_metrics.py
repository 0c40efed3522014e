"""Values of a metric become one in any order and division, as numpy computes it of all values."""

import functools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.core import step_metrics
from sparse_dataflow.core.step_metrics import Load, Max, Mean, Norm, StepReport, Sum

KINDS = [
    (lambda x: Sum(x.sum(-1)), lambda x: x.sum()),
    (lambda x: Mean(x.sum(-1), np.float32(x.shape[-1]) + 0 * x[..., 0]), lambda x: x.mean()),
    (lambda x: Max(x.max(-1)), lambda x: x.max()),
    (lambda x: Max(-np.abs(x).min(-1)), lambda x: -np.abs(x).min()),
    (lambda x: Norm({"a": np.square(x).sum(-1)}), lambda x: math.sqrt(np.square(x).sum())),
    (lambda x: Load(np.abs(x)), lambda x: np.abs(x).sum(0).max() / np.abs(x).sum(0).mean()),
]
"""(metric of values [..., n], numpy's number of all values [parts, n])."""


def values(parts, seed):
    return np.random.default_rng(seed).normal(size=(parts, 6)).astype(np.float32)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 5), st.integers(0, 99), st.booleans())
def test_micro_batches_combine_to_the_number_of_all_values(kind, parts, seed, reverse):
    metric, number = kind
    rows = values(parts, seed)
    each = [{"x": metric(row)} for row in (rows[::-1] if reverse else rows)]
    start = step_metrics.empty(each[0])
    total = functools.reduce(step_metrics.combined, each, start)
    assert total["x"].number() == pytest.approx(number(rows), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [1, 3, 4])
def test_devices_combine_to_the_number_of_all_values(kind, parts):
    metric, number = kind
    rows = values(parts, parts)
    devices = jax.tree.map(lambda *leaves: np.stack(leaves), *[metric(row) for row in rows])
    over = functools.partial(step_metrics.over_devices, axes=("devices",))
    one = jax.tree.map(lambda leaf: leaf[0], jax.vmap(over, axis_name="devices")(devices))
    assert one.number() == pytest.approx(number(rows), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("metric", "number"), KINDS[:-1])
def test_layers_combine_and_each_has_its_number(metric, number):
    rows = values(3, 7)
    layers = step_metrics.stacked([{"x": metric(row)} for row in rows])["x"]
    assert layers.number() == pytest.approx(number(rows), rel=1e-4)
    if not isinstance(layers, Norm):
        assert list(layers.by_part()) == ["layer 0", "layer 1", "layer 2"]
        each = [number(row[None]) for row in rows]
        np.testing.assert_allclose(list(layers.by_part().values()), each, rtol=1e-4)


def test_a_mean_of_parts_of_other_sizes_is_that_of_all_values():
    rows = [np.float32([1, 2, 3]), np.float32([10]), np.zeros(0, np.float32)]
    each = [Mean(row.sum(), np.float32(len(row))) for row in rows]
    assert functools.reduce(step_metrics.combined, each).number() == 4
    assert each[-1].number() == 0
    assert Mean(np.float32([1, 9, 0]), np.float32([1, 3, 0])).number() == 2.5
    weighted = Mean(np.float32(0.1), np.float32(0.25))
    assert weighted.number() == pytest.approx(0.4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_report_names_the_first_layer_that_is_not_finite(bad):
    z = Mean(np.float32([1, bad, bad]), np.ones(3, np.float32))
    good = {"loss": Sum(np.float32(2)), "gradient_norm": Norm({"embed": np.float32(4)})}
    report = StepReport({**good, "z": z, "scalar": Max(np.float32(bad)), "fine": Sum(1.0)})
    assert list(report.non_finite()) == ["z of layer 1", "scalar"]
    assert report.gradient_norms == {"embed": 2} and report.numbers()["gradient_norm"] == 2
