"""Moments of batches: those of all rows, however these are split, and whatever their mean is."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.pruning.moments import HELD_OUT, Moments, SplitMoments


def rows(count, mean=0.0, inputs=6, outputs=4):
    rng = np.random.default_rng(count)
    x = rng.normal(size=(count, inputs)) + mean
    return x, x @ rng.normal(size=(inputs, outputs))


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.booleans())
def test_one_row_in_five_of_all_batches_is_held_out(sizes, has_bias):
    total = sum(sizes)
    x, y = rows(total, 3.0)
    moments = SplitMoments()
    for start, size in zip(np.cumsum([0, *sizes]), sizes):
        moments.add(x[start : start + size], y[start : start + size])
    if total < HELD_OUT:
        with pytest.raises(UserError, match=f"have {total} rows.*legal: 5 rows or more"):
            moments.read(has_bias)
        return
    fit, held_out = moments.read(has_bias)
    assert held_out.tokens == total // HELD_OUT and fit.tokens == total - total // HELD_OUT
    expected = Moments.of(x, y)
    if has_bias:
        expected = expected.about(x.mean(0), y.mean(0))
    both = fit + held_out
    np.testing.assert_allclose(both.inputs, expected.inputs, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(both.products, expected.products, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(both.squares, expected.squares, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("mean", [0.0, 600.0, 1e4])
def test_float32_batches_have_the_moments_of_float64(mean, has_bias):
    x, _ = rows(400, mean)
    x = x.astype(np.float32)
    y = (x.astype(np.float64) @ rows(6)[1][:6, :4]).astype(np.float32)
    moments = SplitMoments()
    for start in range(0, 400, 50):
        moments.add(*(jnp.asarray(a[start : start + 50]) for a in (x, y)))
    fit, held_out = moments.read(has_bias)
    x, y = x.astype(np.float64), y.astype(np.float64)
    if has_bias:
        x, y = x - x.mean(0), y - y.mean(0)
    both, scale = fit + held_out, len(x) if has_bias else len(x) * (1 + mean**2)
    np.testing.assert_allclose(both.inputs, x.T @ x, rtol=1e-9, atol=1e-5 * len(x))
    error = np.abs(both.products - x.T @ y).max()
    assert error < 1e-5 * scale
    assert fit.finite and held_out.finite
