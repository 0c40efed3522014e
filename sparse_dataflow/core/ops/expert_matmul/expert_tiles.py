"""The expert product as a loop over tiles, for a CPU.

There, XLA computes `jax.lax.ragged_dot` as a masked product of every row with every expert.  This
loop multiplies each row once, forward and backward, copies no weight, and ends at the last tile
that has an expert.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.core.ops import derivatives

_PRODUCT, _TRANSPOSED = "sgd,gdf->sgf", "sgf,gdf->sgd"


def expert_matmul(x_SxGxD: jax.Array, weights_ExGxDxF: jax.Array, tiles_T: jax.Array) -> jax.Array:
    """See `expert_matmul_op.expert_matmul`."""
    return _matmul(None, x_SxGxD, weights_ExGxDxF, tiles_T)


def _value(_, x, weights, tiles):
    return _products(x, weights, tiles, _PRODUCT)


def _products(x, weights, tiles, equation):
    x_tiles = _tiled(x, tiles)

    def product(i, y):
        return y.at[i].set(_einsum(equation, x_tiles[i], weights[tiles[i]]).astype(x.dtype))

    parts, outputs = weights.shape[1], weights.shape[2 if equation == _TRANSPOSED else 3]
    # Zeros, as the loop ends at the last tile that has rows.
    y = jnp.zeros((*x_tiles.shape[:2], parts, outputs), x.dtype)
    y = lax.fori_loop(0, _filled(weights, tiles), product, y)
    return y.reshape(len(x), parts, outputs)


def _filled(weights, tiles):
    """Returns the number of tiles that have an expert; they are first."""
    return jnp.sum(tiles < len(weights))


def _tiled(x, tiles):
    return x.reshape(len(tiles), -1, *x.shape[1:])


def _einsum(equation, a, b):
    """Product in float32 or wider: a CPU has none of bfloat16 operands with a float32 result."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    a, b = a.astype(wide), b.astype(wide)
    if equation == _PRODUCT and len(b) == 1:
        # With a batch axis, even of size 1, XLA's product takes several times as long.
        return (a[:, 0] @ b[0])[:, None]
    return jnp.einsum(equation, a, b)


def _backward(_, saved, dy):
    x, weights, tiles = saved
    dx = _products(dy, weights, tiles, _TRANSPOSED)
    wide = jnp.promote_types(weights.dtype, jnp.float32)
    x_tiles, dy_tiles = _tiled(x, tiles), _tiled(dy, tiles)

    # Several tiles of an expert add to one gradient, in float32.
    def add(i, total):
        return total.at[tiles[i]].add(_einsum("sgd,sgf->gdf", x_tiles[i], dy_tiles[i]))

    total = lax.fori_loop(0, _filled(weights, tiles), add, jnp.zeros(weights.shape, wide))
    return dx, total.astype(weights.dtype), None


_matmul = derivatives.bilinear(_value, _backward)
