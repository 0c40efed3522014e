"""Causal self-attention, behind one function."""

import jax


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """softmax(q kᵀ / sqrt(head_dim)) v with a causal mask.

    Args:
      query: float [batch, tokens, heads, head_dim].
      key: like query.
      value: like query.

    Returns:
      [batch, tokens, heads, head_dim] in query's dtype; the softmax runs in float32.
    """
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)
