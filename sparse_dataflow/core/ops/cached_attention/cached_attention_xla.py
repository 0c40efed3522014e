"""Attention to a cache by XLA."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from sparse_dataflow.core.layouts.attention_blocks import slot_contents
from sparse_dataflow.core.ops import dispatch, platforms
from sparse_dataflow.core.ops.attention.dot_product import masked_attention


def run_cached_attention(
    q, k, v, keys, values, positions_BxT, window: int, cap: float, has_room: bool, layout=None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute `cached_attention`."""
    # [B, T, S]: the token at each place of the cache, and its distance from a new one.
    places_BxT, at = positions_BxT, jnp.arange(keys.shape[2])
    if layout is not None:
        places_BxT, at = _compact_places(layout, positions_BxT, keys.shape[2])
    distance = positions_BxT[..., None] - at
    visible = (distance >= 0) & (at >= 0)
    if window:
        visible &= distance < window
    if layout is not None:
        rows = positions_BxT[..., None] // layout.block
        visible &= jnp.asarray(layout.mask)[at // layout.block, rows]
    if has_room and positions_BxT.shape[0] == 1:
        # A scatter reads what is there, in a kernel of its own, and keeps it out of bounds.
        start = 0, 0, places_BxT[0, 0], 0
        keys, values = (
            jax.lax.dynamic_update_slice(array, new.swapaxes(1, 2), start)
            for array, new in ((keys, k), (values, v))
        )
    else:
        # Indices on both sides of a slice move to the front: the result is [B, T, kv heads, width],
        # as k.  A position past the cache is out of bounds, and such writes are dropped.
        rows = jnp.arange(positions_BxT.shape[0])[:, None]
        keys = keys.at[rows, :, places_BxT].set(k)
        values = values.at[rows, :, places_BxT].set(v)
    if dispatch.on(platforms.REORDERED_LOOPS):
        # Else XLA turns the caches for the loop over tokens, before it and after.
        keys, values = (with_layout_constraint(a, Layout((0, 1, 2, 3))) for a in (keys, values))
    # [B, N, S, K] -> [B, S, N, K].  A head's keys are together in the cache; attention takes the
    # heads after the tokens.
    k, v = (array.swapaxes(1, 2) for array in (keys, values))
    return masked_attention(q, k, v, visible[:, None], cap), keys, values


def _compact_places(layout, positions_BxT, size):
    """Returns the place of each new token in a cache of `size` places, and the token at each place,
    [B, T, S], below 0 where none is."""
    block, contents = layout.block, slot_contents(layout)
    if size != contents.shape[1] * block:  # The cache has all tokens.
        return positions_BxT, jnp.arange(size)
    slot_of = jnp.asarray((contents == np.arange(len(contents))[:, None]).argmax(1))
    rows_BxT = positions_BxT // block
    places_BxT = slot_of[rows_BxT] * block + positions_BxT % block
    starts = jnp.asarray(np.where(contents < 0, -(2**24), contents * block))[rows_BxT]
    at = (starts[..., None] + jnp.arange(block)).reshape(*rows_BxT.shape, size)
    # A token without a place is written nowhere, as an index past the end is.
    return jnp.where(rows_BxT < len(contents), places_BxT, size), at
