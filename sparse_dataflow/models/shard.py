"""The tensor-parallel shard of a model in one program, and its collectives."""

import dataclasses

import jax
from jax import lax


@dataclasses.dataclass(frozen=True)
class Shard:
    """One device's shard of every section, under tensor parallelism (arXiv 1909.08053, section 3).

    Each device holds some heads and hidden features of a block: output columns of `qkv` and
    `mlp_in`, input rows of `attn_out` and `mlp_out`.  The residual and the norms are sharded over
    the tokens of a sequence instead (sequence parallelism, arXiv 2205.05198).  Partial sums are
    therefore reduce-scattered, and nothing is computed twice.

    Each device computes a share of the loss; the loss is the sum of the shares.  The gradient of a
    replicated parameter is the sum of the devices' gradients.

    Attributes:
      axis: mesh axis of the enclosing `shard_map`; None for an unsharded model.
      vocabulary: whether the rows of the embedding are sharded; otherwise it is replicated.
    """

    axis: str | None = None
    vocabulary: bool = False

    def gather(self, x: jax.Array) -> jax.Array:
        """All-gathers tokens: [B, T / devices, ...] -> [B, T, ...]."""
        return x if self.axis is None else lax.all_gather(x, self.axis, axis=1, tiled=True)

    def reduce(self, y: jax.Array) -> jax.Array:
        """Reduce-scatters partial sums over tokens: [B, T, ...] -> [B, T / devices, ...]."""
        if self.axis is None:
            return y
        return lax.psum_scatter(y, self.axis, scatter_dimension=1, tiled=True)

    def slice(self, tokens: jax.Array, axis: int) -> jax.Array:
        """Slices a replicated array along `axis` to this device's tokens."""
        if self.axis is None:
            return tokens
        length = tokens.shape[axis] // lax.axis_size(self.axis)
        start = lax.axis_index(self.axis) * length
        return lax.dynamic_slice_in_dim(tokens, start, length, axis)


WHOLE = Shard()
"""The unsharded model."""
