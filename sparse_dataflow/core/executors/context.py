"""Context parallelism: the axis "context" shards the tokens of each sequence.

A device has the tokens of two chunks, the i-th from either end of the sequence ("zig-zag").  A
causal query sees all keys before it, so every device then has the same number of pairs of query
and key.  Attention gathers keys and values of all tokens (arXiv 2407.21783, section 3.3.2); nothing
else of a layer mixes tokens.  The backward pass gathers them again.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sparse_dataflow.core.config.remat import KEYS_VALUES
from sparse_dataflow.core.ops.attention.attention_op import shard_attention


def zigzag(tokens: int, shards: int) -> np.ndarray:
    """Returns the positions of the tokens of each shard, int32 [shards, tokens / shards].

    `tokens` is a multiple of 2 * shards.
    """
    chunks = np.arange(tokens, dtype=np.int32).reshape(2 * shards, -1)
    # Of 2 n chunks, shard i has chunk i from the front and chunk 2 n - 1 - i, counted from the
    # back.
    return np.concatenate([chunks[:shards], chunks[: shards - 1 : -1]], axis=1)


@dataclasses.dataclass(frozen=True)
class Context:
    """The tokens of one device, inside `shard_map`.

    Attributes:
      axis: mesh axis that shards the tokens.
      shards: its size.
    """

    axis: str
    shards: int

    def positions(self, tokens: int) -> jax.Array:
        """Returns the positions of this device's tokens, int32 [tokens / shards]."""
        return jnp.asarray(zigzag(tokens, self.shards))[lax.axis_index(self.axis)]

    def local_tokens(self, array: jax.Array) -> jax.Array:
        """Returns this device's tokens of [B, T, ...]."""
        return jnp.take(array, self.positions(array.shape[1]), axis=1)

    def gather(self, x: jax.Array) -> jax.Array:
        """All-gathers tokens, in their order: [B, T / shards, ...] -> [B, T, ...]."""
        rows, length, *rest = x.shape
        shards = lax.all_gather(x, self.axis, axis=1)  # [B, shards, T / shards, ...]
        shards = shards.reshape(rows, self.shards, 2, length // 2, *rest)
        # The second chunks descend from shard to shard; reversed, they continue the first ones.
        ordered = jnp.concatenate([shards[:, :, 0], shards[:, ::-1, 1]], axis=1)
        return ordered.reshape(rows, self.shards * length, *rest)

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        *,
        documents: jax.Array | None = None,
        **settings: Any,
    ) -> jax.Array:
        """Computes `attention_op.self_attention` of this device's queries to all keys.

        Args:
          query: float [B, T / shards, heads, head_dim].
          key: [B, T / shards, kv heads, head_dim].
          value: like key.
          documents: int32 [B, T], of all tokens.
          **settings: window, cap, bidirectional and blocks.
        """
        key, value = (checkpoint_name(self.gather(a), KEYS_VALUES) for a in (key, value))
        # The mask compares positions, as neither queries nor their distances are consecutive here.
        order, shard = zigzag(key.shape[1], self.shards), lax.axis_index(self.axis)
        return shard_attention(query, key, value, order, shard, documents=documents, **settings)
