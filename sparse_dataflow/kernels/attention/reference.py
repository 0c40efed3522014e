"""Causal attention as its definition says it; every implementation agrees with it."""

import math

import jax
import jax.numpy as jnp


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """softmax(q kᵀ / sqrt(head_dim) where key <= query) v, summed in float32 or wider.

    All [batch, tokens, heads, head_dim]; the scores are held whole.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bthk,bshk->bhts", query, key, preferred_element_type=wide)
    seen = jnp.tri(query.shape[1], dtype=bool)
    scores = jnp.where(seen, scores / math.sqrt(query.shape[-1]), -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights, value.astype(wide)).astype(query.dtype)
