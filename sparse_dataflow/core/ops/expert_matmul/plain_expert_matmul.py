"""The reference of the expert product: a loop over tiles."""

import jax
import jax.numpy as jnp


def expert_matmul(x_SxGxD: jax.Array, weights_ExGxDxF: jax.Array, tiles_T: jax.Array) -> jax.Array:
    """See `expert_matmul_op.expert_matmul`."""
    tiles = jnp.split(x_SxGxD, len(tiles_T))
    products = [
        jnp.einsum("sgd,gdf->sgf", tile, weights_ExGxDxF[expert])
        for tile, expert in zip(tiles, tiles_T, strict=True)
    ]
    return jnp.concatenate(products)
