"""Parameters that many tokens share: their gradients are summed in float32 or wider.

Autodiff sums in the dtype of the cotangents.  In bfloat16, 24,576 tokens of gradient 1 give a bias
29,952 on a CPU, and a token that occurs 1,000 times gives its embedding 256.
"""

import jax
import jax.numpy as jnp

from sparse_dataflow.core.ops import derivatives, dispatch


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of logits, losses and sums: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


def broadcast_like(parameter: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcast a parameter, for instance a bias, to the shape and dtype of `like`."""
    return jnp.broadcast_to(parameter.astype(wide(like.dtype)), like.shape).astype(like.dtype)


def lookup(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Take rows of a table.

    Args:
      table: float [length, features].
      rows: int32 of any shape, in [0, length).

    Returns:
      [*rows.shape, features], in the dtype of the table.
    """
    table, rows = dispatch.equally_varying(table, rows)
    return _lookup(len(table), table, rows)


def _lookup_gradient(length, rows, dy):
    dtype = wide(dy.dtype)
    zeros = jnp.zeros((length, dy.shape[-1]), dtype)
    zeros, rows, dy = dispatch.equally_varying(zeros, rows, dy)
    return zeros.at[rows].add(dy.astype(dtype)).astype(dy.dtype), None


_lookup = derivatives.differentiable(
    lambda length, table, rows: table[rows],
    _lookup_gradient,
    forward=lambda length, table, rows: (table[rows], rows),
    tangent=lambda length, rows, tangents: tangents[0][rows],
)
