"""The product of two matrices, in the form that XLA multiplies fastest on a CPU.

XLA's CPU kernels take bfloat16 where the left matrix is contracted over its last axis.  Else XLA
converts both to float32 and takes twice as long: so it is for every gradient of a weight, which is
contracted over tokens.  A transposed copy of the left matrix is a few percent of such a product.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from sparse_dataflow.core.ops import derivatives, dispatch, platforms


def copies(dtype: jnp.dtype) -> bool:
    """Return whether products of such matrices are faster with a transposed copy."""
    return dtype != derivatives.wide(dtype) and dispatch.on(platforms.SLOW_TRANSPOSED)


def transposed(a: jax.Array) -> jax.Array:
    """Swap the last two axes, in a copy where a product on a CPU is faster with it."""
    if not copies(a.dtype):
        return a.swapaxes(-1, -2)
    # Without the barrier the copy would compute what came before it, in a slow order; without the
    # constraint there is no copy.
    swapped = lax.optimization_barrier(a).swapaxes(-1, -2)
    return with_layout_constraint(swapped, Layout(tuple(range(a.ndim))))


def dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """Contract one axis of each matrix; the result is float32 or wider."""
    wide = derivatives.wide(a.dtype)
    if a_axis == 0 and copies(a.dtype):
        # Both at once, or the copy is made in the forward pass already.
        a, b = lax.optimization_barrier((a, b))
        a, a_axis = transposed(a), 1
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=wide)


def _value(_, x, weight):
    return dot(x, weight, 1, 0).astype(x.dtype)


def _backward(_, saved, dy):
    x, weight = saved
    dx = dot(dy, weight, 1, 1).astype(x.dtype)
    return dx, dot(x, dy, 0, 0).astype(weight.dtype)


_product = derivatives.bilinear(_value, _backward)


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Compute `x @ weight` for x [tokens, in] and weight [in, out], in x's dtype.

    Where `copies`, the gradient of the weight is a product of a transposed copy.
    """
    if not copies(x.dtype):
        return jnp.matmul(x, weight)
    return _product(None, *dispatch.equally_varying(x, weight))
