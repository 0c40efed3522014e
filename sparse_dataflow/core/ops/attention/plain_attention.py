"""The definition of causal attention, which every implementation matches."""

import math

import jax
import jax.numpy as jnp


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    window: int = 0,
    cap: float = 0.0,
    documents: jax.Array | None = None,
) -> jax.Array:
    """Compute softmax(q kᵀ / sqrt(head_dim) where key <= query) v, in float32 or wider.

    Arrays are as in `attention_op.causal_attention`.  Scores, and a key for each query head, are
    materialized.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(array, group, axis=2) for array in (key, value))
    scores = jnp.einsum("bthk,bshk->bhts", query, key, preferred_element_type=wide)
    seen = jnp.tri(query.shape[1], dtype=bool)
    if window:
        seen &= ~jnp.tri(query.shape[1], k=-window, dtype=bool)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores /= math.sqrt(query.shape[-1])
    if cap:
        scores = cap * jnp.tanh(scores / cap)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights, value.astype(wide)).astype(query.dtype)
