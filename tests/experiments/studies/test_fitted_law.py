"""The law is fitted: it predicts, says how sure it is, and refuses with a message."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.studies.fitted_law import (
    COLUMNS,
    CONSTANTS,
    Runs,
    ScalingLaw,
    best_for_budget,
    bootstrap,
    fit,
    interval,
    noise,
)
from sparse_dataflow.files.errors import UserError

LAW = ScalingLaw(16.8, 0.722, 45.0, 0.245, 6.9e8, 0.203, 0.651)


def grid(law=LAW, noise=0.0, seed=0):
    axes = np.geomspace(3e5, 3e7, 4), [0.0, 0.5, 0.75, 0.875], np.geomspace(1e6, 1e8, 4)
    columns = [axis.ravel() for axis in np.meshgrid(*axes)]
    noisy = np.exp(noise * np.random.default_rng(seed).normal(size=columns[0].shape))
    return Runs(*columns, law.loss(*columns) * noisy)


laws = st.builds(
    ScalingLaw,
    a_s=st.floats(5, 30),
    b_s=st.floats(0.4, 1.2),
    c_s=st.floats(20, 60),
    b_n=st.floats(0.2, 0.35),
    a_d=st.floats(3e7, 1e9),
    b_d=st.floats(0.15, 0.3),
    c=st.floats(0.3, 1.5),
)


@settings(max_examples=5)
@given(laws)
def test_a_fitted_law_extrapolates(law):
    fitted = fit(grid(law), starts=8)
    beyond = 1e8, 0.9375, 1e9
    assert fitted.loss(*beyond) == pytest.approx(law.loss(*beyond), rel=0.01)
    assert fitted.dense_equivalent(0.875) == pytest.approx(law.dense_equivalent(0.875), rel=0.05)


def test_constants_do_not_depend_on_the_units_of_the_fit():
    fitted = fit(grid(), starts=8)
    constants = fitted.constants_in_units_of_1()
    converted = ScalingLaw(**constants)
    assert converted.loss(1e6, 0.5, 1e7) == pytest.approx(fitted.loss(1e6, 0.5, 1e7), rel=1e-9)
    for name in ("b_n", "b_d", "c"):
        assert constants[name] == pytest.approx(getattr(LAW, name), rel=0.1)


def test_a_dense_equivalent_model_has_the_same_loss():
    ratio = LAW.dense_equivalent(0.875)
    assert 1 < ratio < 8
    assert LAW.loss(1e6, 0.875, 1e8) == pytest.approx(LAW.loss(ratio * 1e6, 0.0, 1e8))


def test_intervals_contain_the_true_loss_and_shrink_with_noise():
    widths = []
    for level in (0.01, 0.001):
        samples = [float(law.loss(1e8, 0.875, 1e9)) for law in bootstrap(grid(noise=level), 30)]
        low, high = interval(samples)
        assert low * 0.97 < LAW.loss(1e8, 0.875, 1e9) < high * 1.03
        widths.append(high - low)
    assert widths[1] < widths[0] / 3


def test_noise_is_the_spread_over_seeds():
    seeds = [grid(noise=0.02, seed=seed) for seed in range(8)]
    columns = (np.concatenate([getattr(runs, name) for runs in seeds]) for name in COLUMNS)
    assert noise(Runs(*columns)) == pytest.approx(0.02, rel=0.1)
    assert noise(grid(noise=0.02)) is None


def test_an_outlier_hardly_moves_the_fit():
    runs = grid(noise=0.001)
    loss = runs.loss.copy()
    loss[5] *= 1.5
    moved = fit(dataclasses.replace(runs, loss=loss), starts=8)
    assert moved.loss(1e8, 0.875, 1e9) == pytest.approx(LAW.loss(1e8, 0.875, 1e9), rel=0.02)


def test_the_best_training_for_a_budget_is_no_worse_than_any_other():
    tokens = np.geomspace(1e5, 1e12, 200)
    loss, parameters, best = best_for_budget(LAW, 1e18, 0.5, 6.0, tokens)
    assert parameters * best * 6 == pytest.approx(1e18)
    assert (LAW.loss(1e18 / 6 / tokens, 0.5, tokens) >= loss).all()
    assert 1e6 < best < 1e11


def test_too_few_or_constant_runs_are_refused():
    with pytest.raises(UserError, match="7 runs cannot fit 7 constants; legal: 8 or more"):
        fit(grid().take(np.arange(7)))
    runs = grid()
    with pytest.raises(UserError, match="All runs have equal sparsity"):
        fit(runs.take(runs.sparsity == 0.5))


@pytest.mark.parametrize(
    ("column", "value", "legal"),
    [
        ("parameters", 0, "above 0"),
        ("sparsity", 1, r"in \[0, 1\)"),
        ("tokens", -3, "above 0"),
        ("loss", np.nan, "above 0"),
    ],
)
def test_illegal_runs_are_named(column, value, legal):
    columns = {name: np.ones(9) * 0.5 for name in ("parameters", "sparsity", "tokens", "loss")}
    columns[column][4] = value
    with pytest.raises(UserError, match=f"Run 5 has {column} .*; legal: {legal}"):
        Runs(**columns)


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(UserError, match="legal: one length"):
        Runs(np.ones(3), np.zeros(3), np.ones(2), np.ones(3))


def test_every_constant_has_a_name():
    assert CONSTANTS == tuple(f.name for f in dataclasses.fields(ScalingLaw))[:7]
