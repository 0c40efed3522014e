"""Products with a block-sparse weight in a given precision, or by a given `dot_general`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.core.layouts.layout import index_tables
from sparse_dataflow.core.ops import derivatives
from sparse_dataflow.core.weights.gradient_norms import with_dense_gradient
from sparse_dataflow.core.weights.kind import Weight
from sparse_dataflow.core.weights.weight import WithDenseGradient
from sparse_dataflow.files.errors import UserError


def precision_name(precision: Any) -> str | None:
    """Returns a precision of products as `jax.default_matmul_precision` takes it.

    Raises:
      UserError: it differs between the operands.
    """
    if isinstance(precision, tuple):
        first, *others = precision
        if any(other != first for other in others):
            raise UserError(
                f"precision is {precision}; legal: the same for both operands, as both gradients "
                "are products too."
            )
        precision = first
    return precision.name.lower() if isinstance(precision, lax.Precision) else precision


def in_precision(precision: object, x: jax.Array, weight: Weight) -> jax.Array:
    """Returns `x @ weight`; its products, and those of its gradient, are in a precision."""
    name = precision_name(precision)
    return x @ weight if name is None else _in_precision(name, x, weight)


def _product(name, x, weight):
    with jax.default_matmul_precision(name):
        return x @ weight


def _backward(name, saved, dy):
    with jax.default_matmul_precision(name):
        return jax.vjp(lambda x, weight: x @ weight, *saved)[1](dy)


_in_precision = derivatives.differentiable(
    _product, _backward, tangent=derivatives.tangent_of(_product)
)


def by_dot_general(
    dot_general: Callable, precision: object, preferred: object, x: jax.Array, weight: Any
) -> jax.Array:
    """Returns `x @ weight` for stored blocks, as one call of a user's `dot_general`.

    Where all blocks are stored, that is the product with the dense kernel.  Else it is a batched
    product, of the input blocks that each output block reads.
    """
    options = {} if preferred is None else {"preferred_element_type": preferred}
    product = functools.partial(dot_general, precision=precision, **options)
    stored: Any = weight.base if isinstance(weight, WithDenseGradient) else weight
    tables, values = index_tables(stored.layout), stored.values
    (in_blocks, out_blocks), fan_in, block = (
        tables.grid,
        tables.in_index.shape[-1],
        values.shape[-1],
    )
    if len(values) == in_blocks * out_blocks:
        # Stored blocks are sorted by (output block, input block).
        kernel = values.reshape(out_blocks, in_blocks, block, block).transpose(1, 2, 0, 3)
        kernel = kernel.reshape(in_blocks * block, -1)
        y = product(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))
    else:
        # A place without a block has the slot -1, which would read the last one: it counts as
        # zeros.
        is_stored = jnp.asarray(tables.in_slot >= 0)
        weights = jnp.where(is_stored[..., None, None], values[tables.in_slot], 0)
        rows = x.reshape(-1, in_blocks, block)[:, tables.in_index]
        rows = jnp.where(is_stored[..., None], rows, 0).reshape(-1, out_blocks, fan_in * block)
        weights = weights.reshape(out_blocks, fan_in * block, block)
        y = product(rows, weights, (((2,), (1,)), ((1,), (0,))))
        y = y.swapaxes(0, 1).reshape(*x.shape[:-1], out_blocks * block)
    return with_dense_gradient(y, x, weight.zeros) if weight is not stored else y
