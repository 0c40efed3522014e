"""Causal attention within documents: no token sees one of an earlier document in its window."""

import jax
import jax.numpy as jnp

from sparse_dataflow.core.ops.attention import dot_product


def document_numbers(tokens: jax.Array, eot_id: int) -> jax.Array:
    """Returns the number of each token's document in its window, int32 [batch, tokens].

    Args:
      tokens: int32 [batch, tokens].
      eot_id: the token that ends a document, and belongs to it.
    """
    ends = (tokens == eot_id).astype(jnp.int32)
    return jnp.cumsum(ends, axis=1) - ends


def document_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: jax.Array,
    window: int = 0,
    cap: float = 0.0,
) -> jax.Array:
    """Compute `api.causal_attention` where query and key have equal `documents`; differentiable.

    Runs on every platform through XLA, which materializes the scores.

    Args:
      query: float [batch, tokens, heads, head_dim].
      key: as `api.causal_attention` takes it.
      value: like key.
      documents: int32 [batch, tokens], see `document_numbers`.
      window: tokens that each query sees, itself and those before it; 0 is all.
      cap: see `api.causal_attention`.
    """
    within = documents[:, None, :, None] == documents[:, None, None, :]
    return dot_product.causal_attention(
        query, key, value, window, cap, implementation="xla", mask=within
    )
