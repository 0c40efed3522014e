"""gelu(x W + bias) and its gradients: random operands, exact results, kernels."""

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.ops.activation import value_and_derivative


def draw(layout, tokens, dtype, seed=0):
    """Return (x, values, dy, bias), standard normal."""
    rng = np.random.default_rng(seed)
    wide = (tokens, layout.out_features)
    shapes = ((tokens, layout.in_features), (layout.nnz, layout.block, layout.block), wide)
    arrays = [rng.normal(size=shape).astype(dtype) for shape in shapes]
    return *arrays, rng.normal(size=layout.out_features).astype(np.float32)


def exact(layout, x, values, dy, bias):
    """Return (y, dx, dvalues, dbias) in float64."""
    x, values, dy, bias = (np.asarray(array, np.float64) for array in (x, values, dy, bias))
    dense = layout.to_dense(values)
    hidden, slope = exact_gelu(x @ dense + bias)
    dz = dy * slope
    return hidden, dz @ dense.T, layout.from_dense(x.T @ dz), dz.sum(0)


def exact_gelu(x):
    """Return (GELU, its derivative) in float64."""
    with jax.enable_x64(True):
        return tuple(map(np.asarray, value_and_derivative("gelu", jnp.asarray(x, jnp.float64))))


def fused(kernels, x, values, dy, bias, tables, **options):
    """Return (y, dx, dvalues, dbias) of a kernel module's product."""

    def product(x, values, bias):
        return kernels.block_sparse_matmul(
            x, values, tables, bias=bias, activation="gelu", **options
        )

    y, pullback = jax.vjp(product, x, values, bias)
    return y, *pullback(dy)


def assert_all_close(actual, expected, dtype):
    """Assert errors within `dtype`'s rounding of each array's largest element."""
    tolerance = 2e-5 if dtype == np.float32 else 2e-2
    for got, right in zip(actual, expected):
        assert got.shape == right.shape
        error = np.abs(np.asarray(got, np.float64) - right)
        assert np.all(error <= tolerance * (np.abs(right).max(initial=0) + 1)), error.max()
