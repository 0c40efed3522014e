"""The definition of causal attention, which every implementation matches."""

import math

import jax
import jax.numpy as jnp


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Compute softmax(q kᵀ / sqrt(head_dim) where key <= query) v, in float32 or wider.

    Arrays are [batch, tokens, heads, head_dim].  The scores are materialized.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bthk,bshk->bhts", query, key, preferred_element_type=wide)
    causal = jnp.tri(query.shape[1], dtype=bool)
    scores = jnp.where(causal, scores / math.sqrt(query.shape[-1]), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights, value.astype(wide)).astype(query.dtype)
