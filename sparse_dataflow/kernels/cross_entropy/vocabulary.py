"""A vocabulary cut over an axis of `shard_map`: each member holds equally many rows in order.

With `axis` None, one program holds all rows.  Rows from the vocabulary's end on are there to make
the parts equal, and stand for no token.
"""

import jax
import jax.numpy as jnp
from jax import lax


def lookup(table: jax.Array, tokens: jax.Array, axis: str) -> jax.Array:
    """Rows of the table where this member holds them, else zeros; the members' sum is the lookup.

    Args:
      table: float [vocab / members, d_model].
      tokens: int32, any shape; over the whole vocabulary.
      axis: of the members.

    Returns:
      [*tokens.shape, d_model].
    """
    rows = own_rows(tokens, len(table), axis)
    held = (rows >= 0) & (rows < len(table))
    return jnp.where(held[..., None], table[jnp.clip(rows, 0, len(table) - 1)], 0)


def own_rows(tokens: jax.Array, held: int, axis: str | None) -> jax.Array:
    """Where tokens are among the `held` rows of this member; outside of them, not here."""
    return tokens if axis is None else tokens - lax.axis_index(axis) * held


def known(logits: jax.Array, size: int | None, axis: str | None) -> jax.Array:
    """Logits with -inf in the rows that stand for no token: float [tokens, vocab / members].

    Args:
      logits: of this member's rows.
      size: of the vocabulary; None where every row stands for a token.
      axis: of the members.
    """
    held = logits.shape[1]
    if size is None or held * (1 if axis is None else lax.axis_size(axis)) <= size:
        return logits
    first = 0 if axis is None else lax.axis_index(axis) * held
    return jnp.where(first + jnp.arange(held) < size, logits, -jnp.inf)


def logsumexp(logits: jax.Array, axis: str | None) -> jax.Array:
    """Over the whole vocabulary: float [tokens, vocab / members] -> [tokens]."""
    if axis is None:
        return jax.nn.logsumexp(logits, axis=1)
    top = lax.stop_gradient(largest(logits, axis))
    return jnp.log(lax.psum(jnp.sum(jnp.exp(logits - top[:, None]), axis=1), axis)) + top


def largest(logits: jax.Array, axis: str | None) -> jax.Array:
    """Over the whole vocabulary: float [tokens, vocab / members] -> [tokens]."""
    own = jnp.max(logits, axis=1)
    return own if axis is None else lax.pmax(own, axis)


def at(logits: jax.Array, rows: jax.Array, axis: str | None) -> jax.Array:
    """The logit of each token's row, which one member holds: -> float [tokens]."""
    if axis is None:
        return jnp.take_along_axis(logits, rows[:, None], axis=1)[:, 0]
    hit = jnp.arange(logits.shape[1]) == rows[:, None]
    return lax.psum(jnp.sum(jnp.where(hit, logits, 0), axis=1), axis)
