"""The Walsh-Hadamard transform against scipy's matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.core.ops.hadamard import factors
from sparse_dataflow.core.ops.hadamard.transform import hadamard

widths = st.sampled_from([1, 2, 4, 8, 16, 32, 128])


@settings(max_examples=20)
@given(widths, st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_it_is_the_orthonormal_matrix_of_each_group_and_its_own_inverse(width, groups, seed):
    x = np.random.default_rng(seed).normal(size=(2, 3, groups * width)).astype("f4")
    matrix = np.kron(np.eye(groups), scipy.linalg.hadamard(width) / width**0.5)
    transformed = hadamard(x, width)
    np.testing.assert_allclose(transformed, x @ matrix, atol=1e-5)
    np.testing.assert_allclose(hadamard(transformed, width), x, atol=1e-5)


def test_its_gradient_is_the_transform():
    x, dy = np.random.default_rng(0).normal(size=(2, 4, 64)).astype("f4")
    _, back = jax.vjp(lambda x: hadamard(x, 32), x)
    np.testing.assert_allclose(back(dy)[0], hadamard(dy, 32), atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_dtype_stays(dtype):
    x = np.random.default_rng(1).normal(size=(5, 256))
    transformed = hadamard(jnp.asarray(x, dtype), 256)
    assert transformed.dtype == dtype
    expected = x @ (scipy.linalg.hadamard(256) / 16)
    np.testing.assert_allclose(np.asarray(transformed, "f4"), expected, atol=0.05)


@given(st.integers(0, 20))
def test_the_factors_are_as_equal_as_powers_of_two_can_be(power):
    outer, inner = factors(2**power)
    assert outer * inner == 2**power and inner // outer in (1, 2)
