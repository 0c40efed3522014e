"""The product with rows by XLA: gather inputs, multiply, and sum; or one whole matrix."""

import jax
import jax.numpy as jnp


def run_row_matmul(
    x: jax.Array, values: jax.Array, inputs: jax.Array | None, scale: jax.Array | None
) -> jax.Array:
    """Compute `row_matmul`."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    x_wide, values = x.astype(wide), values.astype(wide)
    if inputs is None:
        # [G, K, W] -> [K, G, W]: with all inputs in order, the groups are one matrix.
        y = x_wide @ values.swapaxes(0, 1).reshape(x.shape[1], -1)
    else:
        # [tokens, G, K, W], summed over the stored rows.
        y = (x_wide[:, inputs][..., None] * values).sum(2).reshape(len(x), -1)
    return (y if scale is None else y * scale).astype(x.dtype)
