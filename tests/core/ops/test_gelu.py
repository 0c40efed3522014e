"""GELU against its formula in numpy's float64; its derivative against a complex step."""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparse_dataflow.core.ops.derivatives import gelu, value_and_derivative


def exact(z):
    """The tanh form of float64 or complex128."""
    return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def precision(dtype):
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


@settings(max_examples=20)
@given(
    hnp.arrays(np.float64, (2, 8), elements=st.floats(-8, 8, width=32)),
    st.sampled_from(["float64", "float32", "bfloat16"]),
)
def test_value_and_gradient(numbers, dtype):
    with precision(dtype):
        x = jnp.asarray(numbers, dtype)
        y, pull = jax.vjp(gelu, x)
        results = y, *pull(jnp.full_like(x, 2)), *value_and_derivative(x)
        wide = np.asarray(x, np.float64)
        values = [np.asarray(result, np.float64) for result in results]
    step = 1e-30
    slope = exact(wide + 1j * step).imag / step
    eps = float(jnp.finfo(dtype).eps)
    # 1 - tanh² has the rounding error of a number near 1, which the slope magnifies.
    tolerance = 8 * eps * (1 + np.abs(wide)) * (1 + wide**2 / 7)
    for result, value, right in zip(results, values, (exact(wide), 2 * slope, exact(wide), slope)):
        assert result.shape == x.shape and result.dtype == x.dtype
        error = np.abs(value - right)
        assert np.all(error <= tolerance), (error / tolerance).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_far_from_zero_it_is_x_or_zero(dtype):
    x = jnp.asarray([-1e4, -30, 30, 1e4], dtype)
    value, slope = value_and_derivative(x)
    np.testing.assert_array_equal(value, jnp.maximum(x, 0))
    np.testing.assert_array_equal(slope, jnp.asarray([0, 0, 1, 1], dtype))


def test_it_is_the_gaussian_error_linear_unit():
    x = np.linspace(-6, 6, 97)
    gaussian = np.array([v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x])
    np.testing.assert_allclose(gelu(x.astype(np.float32)), gaussian, atol=6e-4)


def test_the_backward_pass_saves_only_the_input():
    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
    residuals = jax.tree.leaves(jax.vjp(gelu, x)[1])
    assert sum(leaf.size for leaf in residuals) == x.size
    # Autodiff of the formula saves more, so the measure can tell.
    plain = jax.tree.leaves(jax.vjp(lambda x: value_and_derivative(x)[0], x)[1])
    assert sum(leaf.size for leaf in plain) > x.size
