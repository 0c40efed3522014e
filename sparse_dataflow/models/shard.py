"""The tensor-parallel shard of a model in one program, and its collectives."""

import dataclasses
from typing import Any

import jax
from jax import lax

from sparse_dataflow.config.model import KEY_VALUE

OUTPUT_AXIS = {"values": 0, "kernel": 1, "b_kernel": 1, "b_factor": 1, "bias": 0}
"""Parameter of a projection -> its axis that output features order.  Stored blocks are sorted by
output block, and each head has equally many."""


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
      kv_copies: devices that compute the same key/value head.  Above 1, the parameters of `k` and
        `v` are replicated, and each device computes with the columns of its own head.
      row_axes: mesh axes that shard the rows of the batch.
      expert_axis: mesh axis whose devices have different experts, which tokens travel to; None if
        every device has the weights of all experts.
    """

    axis: str | None = None
    vocabulary: bool = False
    kv_copies: int = 1
    row_axes: tuple[str, ...] = ()
    expert_axis: str | None = None

    @property
    def devices(self) -> int:
        """Number of devices that share the model, inside `shard_map`."""
        return 1 if self.axis is None else lax.axis_size(self.axis)

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

    def own_experts(self, experts: jax.Array) -> jax.Array:
        """Slices a replicated array [experts, ...] to the experts of this device."""
        if self.expert_axis is None:
            return experts
        length = len(experts) // lax.axis_size(self.expert_axis)
        start = lax.axis_index(self.expert_axis) * length
        return lax.dynamic_slice_in_dim(experts, start, length)

    def local(self, block: dict[str, Any]) -> dict[str, Any]:
        """Returns the parameters of a block with those of `k` and `v` sliced to this device's head.

        The gradient of a replicated weight is zero outside of this device's columns, so its sum
        over the devices has the sum over the copies of each head.
        """
        if self.kv_copies == 1:
            return block
        heads = lax.axis_size(self.axis) // self.kv_copies
        head = lax.axis_index(self.axis) // self.kv_copies

        def columns(name, leaf):
            if name not in OUTPUT_AXIS:
                return leaf
            axis = OUTPUT_AXIS[name]
            length = leaf.shape[axis] // heads
            return lax.dynamic_slice_in_dim(leaf, head * length, length, axis)

        sliced = {
            module: {name: columns(name, leaf) for name, leaf in block[module].items()}
            for module in KEY_VALUE
        }
        return {**block, **sliced}

    def sum_copies(self, gradient: jax.Array) -> jax.Array:
        """Sums a gradient of `k` or `v` over the devices that compute the same head."""
        if self.kv_copies == 1:
            return gradient
        devices = range(lax.axis_size(self.axis))
        groups = [list(devices[i : i + self.kv_copies]) for i in devices[:: self.kv_copies]]
        return lax.psum(gradient, self.axis, axis_index_groups=groups)


WHOLE = Shard()
"""The unsharded model."""
