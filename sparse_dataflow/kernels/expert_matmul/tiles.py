"""The expert product as a loop over tiles, for a CPU.

There, XLA computes `jax.lax.ragged_dot` as a masked product of every row with every expert.  This
loop multiplies each row once, forward and backward, and copies no weight.
"""

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_vjp
def expert_matmul(x_SxGxD: jax.Array, weights_ExGxDxF: jax.Array, tiles_T: jax.Array) -> jax.Array:
    """See `api.expert_matmul`."""
    return _products(x_SxGxD, weights_ExGxDxF, tiles_T, "sgd,gdf->sgf")


def _products(x, weights, tiles, equation):
    def product(operands):
        rows, expert = operands
        return _einsum(equation, rows, weights[expert]).astype(x.dtype)

    y = lax.map(product, (_tiled(x, tiles), tiles))
    return y.reshape(len(x), *y.shape[2:])


def _tiled(x, tiles):
    return x.reshape(len(tiles), -1, *x.shape[1:])


def _einsum(equation, a, b):
    """Product in float32 or wider: a CPU has none of bfloat16 operands with a float32 result."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(equation, a.astype(wide), b.astype(wide))


def _forward(x, weights, tiles):
    return expert_matmul(x, weights, tiles), (x, weights, tiles)


def _backward(saved, dy):
    x, weights, tiles = saved
    dx = _products(dy, weights, tiles, "sgf,gdf->sgd")
    wide = jnp.promote_types(weights.dtype, jnp.float32)

    def add(total, operands):
        rows, row_gradients, expert = operands
        return total.at[expert].add(_einsum("sgd,sgf->gdf", rows, row_gradients)), None

    operands = _tiled(x, tiles), _tiled(dy, tiles), tiles
    total, _ = lax.scan(add, jnp.zeros(weights.shape, wide), operands)
    return dx, total.astype(weights.dtype), None


expert_matmul.defvjp(_forward, _backward)
