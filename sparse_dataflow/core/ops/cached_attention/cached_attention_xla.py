"""Attention to a cache by XLA."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from sparse_dataflow.core.ops import dispatch, platforms
from sparse_dataflow.core.ops.attention.dot_product import masked_attention


def run_cached_attention(
    q, k, v, keys, values, positions_BxT, window: int, cap: float, has_room: bool, layout=None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute `cached_attention`."""
    # [B, T, S]: how many places each place of the cache is before a new token.
    distance = positions_BxT[..., None] - jnp.arange(keys.shape[2])
    visible = distance >= 0
    if window:
        visible &= distance < window
    if layout is not None:
        place = jnp.arange(keys.shape[2]) // layout.block
        visible &= jnp.asarray(layout.mask)[place, positions_BxT[..., None] // layout.block]
    if has_room and positions_BxT.shape[0] == 1:
        # A scatter reads what is there, in a kernel of its own, and keeps it out of bounds.
        start = 0, 0, positions_BxT[0, 0], 0
        keys, values = (
            jax.lax.dynamic_update_slice(array, new.swapaxes(1, 2), start)
            for array, new in ((keys, k), (values, v))
        )
    else:
        # Indices on both sides of a slice move to the front: the result is [B, T, kv heads, width],
        # as k.  A position past the cache is out of bounds, and such writes are dropped.
        rows = jnp.arange(positions_BxT.shape[0])[:, None]
        keys = keys.at[rows, :, positions_BxT].set(k)
        values = values.at[rows, :, positions_BxT].set(v)
    if dispatch.on(platforms.REORDERED_LOOPS):
        # Else XLA turns the caches for the loop over tokens, before it and after.
        keys, values = (with_layout_constraint(a, Layout((0, 1, 2, 3))) for a in (keys, values))
    # [B, N, S, K] -> [B, S, N, K].  A head's keys are together in the cache; attention takes the
    # heads after the tokens.
    k, v = (array.swapaxes(1, 2) for array in (keys, values))
    return masked_attention(q, k, v, visible[:, None], cap), keys, values
