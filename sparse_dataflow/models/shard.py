"""What part of a model a program holds, and how a section meets the others' parts."""

import dataclasses

import jax
from jax import lax


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of every section that one member of a group holds (arXiv 1909.08053, section 3).

    Each member holds some heads and hidden features of a block: output columns of `qkv` and
    `mlp_in`, input rows of `attn_out` and `mlp_out`.  The residual and the norms are cut over the
    tokens of a sequence instead (sequence parallelism, arXiv 2205.05198), so what is summed over
    the group is at once dealt out again, and nothing is computed twice.

    Every member computes a share of the loss; the shares' sum is the loss, and the sum of the
    members' gradients is the gradient of a parameter that all of them hold.

    Attributes:
      axis: of the `shard_map` around the program whose members form the group; None where one
        program holds all.
      vocabulary: whether each member holds some rows of the embedding, rather than all of them.
    """

    axis: str | None = None
    vocabulary: bool = False

    def gather(self, x: jax.Array) -> jax.Array:
        """The members' tokens together: [B, T / members, ...] -> [B, T, ...]."""
        return x if self.axis is None else lax.all_gather(x, self.axis, axis=1, tiled=True)

    def reduce(self, y: jax.Array) -> jax.Array:
        """The members' partial sums, summed: [B, T, ...] -> [B, T / members, ...]."""
        if self.axis is None:
            return y
        return lax.psum_scatter(y, self.axis, scatter_dimension=1, tiled=True)

    def own(self, tokens: jax.Array, axis: int) -> jax.Array:
        """This member's part of what all members have, T cut along `axis`."""
        if self.axis is None:
            return tokens
        length = tokens.shape[axis] // lax.axis_size(self.axis)
        start = lax.axis_index(self.axis) * length
        return lax.dynamic_slice_in_dim(tokens, start, length, axis)


WHOLE = Shard()
"""One program holds all of the model."""
