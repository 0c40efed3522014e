"""Documents in a window of tokens: no token sees one of an earlier document."""

import jax
import jax.numpy as jnp


def document_numbers(tokens: jax.Array, eot_id: int) -> jax.Array:
    """Returns the number of each token's document in its window, int32 [batch, tokens].

    Args:
      tokens: int32 [batch, tokens].
      eot_id: the token that ends a document, and belongs to it.
    """
    ends = (tokens == eot_id).astype(jnp.int32)
    return jnp.cumsum(ends, axis=1) - ends
