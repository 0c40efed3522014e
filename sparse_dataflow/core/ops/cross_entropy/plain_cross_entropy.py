"""The definition of the cross-entropy, with the full logits."""

import jax
import jax.numpy as jnp


def token_losses(x: jax.Array, embedding: jax.Array, targets: jax.Array) -> jax.Array:
    """Return -log softmax(x Eᵀ)[target] of each token; see `cross_entropy_op.token_scores`."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.matmul(x, embedding.T, preferred_element_type=wide)
    log_probability = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probability, targets[:, None], axis=1)[:, 0]


def weighted_loss(
    x: jax.Array, embedding: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
    """Return the sum of weights * token_losses."""
    return jnp.sum(token_losses(x, embedding, targets) * weights)
