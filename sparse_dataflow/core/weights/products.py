"""Products of tokens with stored matrices."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sparse_dataflow.core.config.projections import PRECISIONS
from sparse_dataflow.core.ops import dispatch, matrix_product, platforms


def by_rows(
    x: jax.Array, kernel: jax.Array, product: Callable = matrix_product.product
) -> jax.Array:
    """Multiplies flattened tokens, because contracting two axes is slower on a CPU.

    Args:
      x: [..., in].
      kernel: [in, out], which is cast to the dtype of x.
      product: of two matrices.

    Returns:
      [..., out], in the dtype of x.
    """
    rows = x.reshape(-1, x.shape[-1])
    kernel = kernel.astype(x.dtype)
    one = dispatch.at_most(rows.shape[0], 1) and len(rows)
    if one and dispatch.on(platforms.SPLIT_ROW_PRODUCTS):
        # XLA turns a small product of one row into a multiplication, which it writes, and a sum.
        y = product(jnp.broadcast_to(rows, (2, rows.shape[1])), kernel)[:1]
    else:
        y = product(rows, kernel)
    return y.reshape(*x.shape[:-1], -1)


def dense(x: jax.Array, kernel: jax.Array, precision: str) -> jax.Array:
    """Returns `by_rows` with operands of a precision; see `ModelConfig`."""
    if precision == PRECISIONS[0]:
        return by_rows(x, kernel)
    return by_rows(x, kernel, functools.partial(_quantized, precision=precision))


def skipping_zeros(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns `by_rows`, where a product of one token reads only the rows of nonzero inputs."""
    from sparse_dataflow.core.ops.nonzero_rows.nonzero_rows_op import nonzero_rows_matmul

    return by_rows(x, kernel, nonzero_rows_matmul)


def _quantized(rows, kernel, precision):
    from sparse_dataflow.core.ops import quantized

    return quantized.matmul(rows, kernel, precision)
