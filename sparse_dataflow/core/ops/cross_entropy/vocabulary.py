"""A vocabulary sharded over axes of `shard_map`: every device has equally many consecutive rows.

With `axis` None, one device has all rows.  Rows past the vocabulary's size are padding, which makes
the shards equal.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.core.ops import wide_sums

Axis = str | tuple[str, ...]
"""Axis of `shard_map`, or several, outermost first."""


def lookup(table: jax.Array, tokens: jax.Array, axis: Axis) -> jax.Array:
    """Look up tokens in the local rows; tokens of other devices give zeros, so sum over `axis`.

    Args:
      table: float [vocab / devices, d_model].
      tokens: int32 of any shape, indices into the whole vocabulary.
      axis: the sharded axis.

    Returns:
      [*tokens.shape, d_model].
    """
    rows = local_rows(tokens, len(table), axis)
    is_local = (rows >= 0) & (rows < len(table))
    found = wide_sums.lookup(table, jnp.clip(rows, 0, len(table) - 1))
    return jnp.where(is_local[..., None], found, 0)


def local_rows(tokens: jax.Array, local_vocab: int, axis: Axis | None) -> jax.Array:
    """Return the tokens' rows on this device; outside [0, local_vocab) on another device."""
    return tokens if axis is None else tokens - lax.axis_index(axis) * local_vocab


def mask_padding(logits: jax.Array, size: int | None, axis: Axis | None) -> jax.Array:
    """Set the logits of padding rows to -inf: float [tokens, vocab / devices].

    Args:
      logits: float [tokens, vocab / devices], of the local rows.
      size: vocabulary size; None if there are no padding rows.
      axis: the sharded axis, or None.
    """
    local_vocab = logits.shape[1]
    if size is None or local_vocab * (1 if axis is None else lax.axis_size(axis)) <= size:
        return logits
    first = 0 if axis is None else lax.axis_index(axis) * local_vocab
    return jnp.where(first + jnp.arange(local_vocab) < size, logits, -jnp.inf)


def logsumexp(logits: jax.Array, axis: Axis | None) -> jax.Array:
    """Reduce over the whole vocabulary: float [tokens, vocab / devices] -> [tokens]."""
    if axis is None:
        return jax.nn.logsumexp(logits, axis=1)
    top = lax.stop_gradient(largest(logits, axis))
    return jnp.log(lax.psum(jnp.sum(jnp.exp(logits - top[:, None]), axis=1), axis)) + top


def largest(logits: jax.Array, axis: Axis | None) -> jax.Array:
    """Return the maximum over the whole vocabulary: [tokens, vocab / devices] -> [tokens]."""
    local_max = jnp.max(logits, axis=1)
    return local_max if axis is None else lax.pmax(local_max, axis)


def at(logits: jax.Array, rows: jax.Array, axis: Axis | None) -> jax.Array:
    """Return the logit at each token's local row, which one device has: float [tokens]."""
    if axis is None:
        return jnp.take_along_axis(logits, rows[:, None], axis=1)[:, 0]
    hit = jnp.arange(logits.shape[1]) == rows[:, None]
    return lax.psum(jnp.sum(jnp.where(hit, logits, 0), axis=1), axis)
