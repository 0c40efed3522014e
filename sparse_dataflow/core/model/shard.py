"""The tensor-parallel shard of a model in one program, and its collectives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import KEY_NORMS, KEY_VALUE
from sparse_dataflow.core.ops import derivatives, dispatch
from sparse_dataflow.core.weights.kind import BIAS, BIAS_NAME


def normalise(norm: nnx.LayerNorm | nnx.RMSNorm, x: jax.Array) -> jax.Array:
    """Applies a norm, whose gradient saves x alone.

    Autodiff would also save x in float32, less its mean, and normalised: in a bfloat16 model six
    arrays of twice the residual stream's bytes for each block, 40% of what a block saves.
    """
    graph, parameters = nnx.split(norm)
    return _norm(graph, *dispatch.equally_varying(parameters, x))


def _normalised(graph, parameters, x):
    return nnx.merge(graph, parameters)(x)


def _norm_gradients(graph, saved, dy):
    saved, dy = derivatives.again(saved, dy)
    return jax.vjp(functools.partial(_normalised, graph), *saved)[1](dy)


_norm = derivatives.differentiable(_normalised, _norm_gradients)


@dataclasses.dataclass(frozen=True)
class Shard:
    """One device's shard of every section, under tensor parallelism (arXiv 1909.08053, section 3).

    Each device holds some heads and hidden features of a block: output columns of `qkv` and
    `mlp_in`, input rows of `attn_out` and `mlp_out`.  The residual and the norms are sharded over
    the tokens of a sequence instead (sequence parallelism, arXiv 2205.05198).  Partial sums are
    therefore reduce-scattered, and nothing is computed twice.

    A second axis, `feature_axis`, cuts the features of the residual stream (the two-dimensional
    tensor parallelism of arXiv 2305.13525): inputs of `qkv` and `mlp_in`, outputs of `attn_out` and
    `mlp_out`.  The paper all-reduces the outputs of the former.  Here they are reduce-scattered by
    heads or hidden features, and gathered before the next product: as many bytes, and attention and
    the activation run once.  Of stored blocks, every device has an equal strip of each: no pattern
    is unbalanced then.

    Each device computes a share of the loss; the loss is the sum of the shares.  The gradient of a
    replicated parameter is the sum of the devices' gradients.

    Attributes:
      axis: mesh axis of the enclosing `shard_map`; None for a model that "tensor" leaves whole.
      vocabulary: whether the rows of the embedding are sharded; otherwise it is replicated.
      kv_copies: devices that compute the same key/value head.  Above 1, the parameters of `k`, `v`
        and `k_norms` are replicated, and each device computes with the columns of its own head.
      row_axes: mesh axes that shard the rows of the batch, or their tokens.
      expert_axis: mesh axis whose devices have different experts, which tokens travel to; None if
        every device has the weights of all experts.
      feature_axis: mesh axis that cuts the features of the residual stream; None for none.
      residual_run: features of the residual stream in a run, of which each device of `feature_axis`
        has an equal consecutive part; see `executors.mesh_axes.cut_run_length`.
    """

    axis: str | None = None
    vocabulary: bool = False
    kv_copies: int = 1
    row_axes: tuple[str, ...] = ()
    expert_axis: str | None = None
    feature_axis: str | None = None
    residual_run: int = 0

    @property
    def devices(self) -> int:
        """Number of devices that share the model, inside `shard_map`."""
        return lax.axis_size(self.axes)

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that shard the model, outermost first."""
        return tuple(axis for axis in (self.axis, self.feature_axis) if axis is not None)

    @property
    def vocabulary_axes(self) -> tuple[str, ...] | None:
        """Mesh axes that shard the rows of the embedding; None if it is replicated."""
        return self.axes if self.vocabulary else None

    @property
    def equal_rows(self) -> int:
        """Number of devices whose residual stream has the same tokens."""
        return 1 if self.feature_axis is None else lax.axis_size(self.feature_axis)

    def gather(self, x: jax.Array) -> jax.Array:
        """All-gathers tokens: [B, T / devices, ...] -> [B, T, ...]."""
        return x if self.axis is None else lax.all_gather(x, self.axis, axis=1, tiled=True)

    def reduce(self, y: jax.Array) -> jax.Array:
        """Reduce-scatters partial sums over tokens: [B, T, ...] -> [B, T / devices, ...]."""
        if self.axis is None:
            return y
        # Each device needs its own tokens only: half of the bytes of an all-reduce.
        return lax.psum_scatter(y, self.axis, scatter_dimension=1, tiled=True)

    def slice(self, tokens: jax.Array, axis: int) -> jax.Array:
        """Slices a replicated array along `axis` to this device's tokens."""
        if self.axis is None:
            return tokens
        length = tokens.shape[axis] // lax.axis_size(self.axis)
        start = lax.axis_index(self.axis) * length
        return lax.dynamic_slice_in_dim(tokens, start, length, axis)

    def gather_features(self, x: jax.Array, run: int = 0) -> jax.Array:
        """All-gathers features over `feature_axis`; `run` as in `residual_run`.

        The collective is one along the tokens, and so is its transpose: the TPU compiler has no
        reduce-scatter of a product along its features, and all-reduces instead.

        Args:
          x: [..., T, features / devices].
          run: see `residual_run`; 0 is a single run.

        Returns:
          [..., T, features].
        """
        if self.feature_axis is None:
            return x
        *rows, tokens, features = x.shape
        # Features of a run on one device.
        length = (run or features * self.equal_rows) // self.equal_rows
        parts = lax.all_gather(x, self.feature_axis, axis=x.ndim - 2, tiled=True)
        # [..., devices, T, runs, length] -> [..., T, runs, devices, length]: in the whole stream a
        # run has the parts of all devices.
        parts = parts.reshape(*rows, self.equal_rows, tokens, -1, length)
        return jnp.moveaxis(parts, -4, -2).reshape(*rows, tokens, -1)

    def reduce_features(self, y: jax.Array, run: int = 0) -> jax.Array:
        """Reduce-scatters partial sums over `feature_axis`; the transpose of `gather_features`."""
        if self.feature_axis is None:
            return y
        # The parts of a device become neighbours along the tokens, the axis that is scattered.
        parts = jnp.moveaxis(self._by_device(y, run), -2, y.ndim - 2)
        *rows, tokens, features = y.shape
        parts = parts.reshape(*rows, tokens * self.equal_rows, features // self.equal_rows)
        return lax.psum_scatter(parts, self.feature_axis, scatter_dimension=y.ndim - 2, tiled=True)

    def sum_features(self, y: jax.Array) -> jax.Array:
        """Sums partial sums over `feature_axis`, on every device."""
        return y if self.feature_axis is None else lax.psum(y, self.feature_axis)

    def slice_features(self, x: jax.Array, run: int = 0) -> jax.Array:
        """Slices the last dimension of a replicated array to this device's features."""
        if self.feature_axis is None:
            return x
        here = lax.axis_index(self.feature_axis)
        part = lax.dynamic_index_in_dim(self._by_device(x, run), here, x.ndim, keepdims=False)
        return part.reshape(*x.shape[:-1], -1)

    def _by_device(self, x, run):
        """Returns [..., features] as [..., runs, devices, features of a run on a device]."""
        length = (run or x.shape[-1]) // self.equal_rows
        return x.reshape(*x.shape[:-1], -1, self.equal_rows, length)

    def normalise(self, norm: nnx.LayerNorm | nnx.RMSNorm, x: jax.Array) -> jax.Array:
        """Applies a norm to this device's features, with the statistics of all features."""
        norm.axis_name = self.feature_axis
        return normalise(norm, x)

    def add_and_normalise(
        self,
        norm: nnx.LayerNorm | nnx.RMSNorm,
        x: jax.Array,
        y: jax.Array | None = None,
        bias: jax.Array | None = None,
        groups: tuple[int, int] = (1, 0),
    ) -> tuple[jax.Array, jax.Array] | None:
        """Returns x + y + bias and its norm by one kernel; None if no kernel does this here.

        Args:
          groups: `Weight.input_groups` of the weight that multiplies the norm.
        """
        if self.feature_axis is not None:
            return None
        from sparse_dataflow.core.ops.residual_norm import residual_norm_op

        shift = getattr(norm, "bias", None)
        assert norm.scale is not None
        parameters = norm.scale[...], None if shift is None else shift[...]
        kind = residual_norm_op.Norm(isinstance(norm, nnx.LayerNorm), norm.epsilon, *groups)
        return residual_norm_op.fused(kind, residual_norm_op.Operands(x, y, bias, *parameters))

    def normalise_heads(self, norm: nnx.LayerNorm | nnx.RMSNorm, x: jax.Array) -> jax.Array:
        """Applies a norm to the features of this device's heads, with the statistics of all."""
        # flax passes the name to `lax.pmean`, which takes several.
        norm.axis_name = self.axes or None  # type: ignore[assignment]
        return normalise(norm, x)

    def own_experts(self, experts: jax.Array) -> jax.Array:
        """Slices a replicated array [experts, ...] to the experts of this device."""
        if self.expert_axis is None:
            return experts
        length = len(experts) // lax.axis_size(self.expert_axis)
        start = lax.axis_index(self.expert_axis) * length
        return lax.dynamic_slice_in_dim(experts, start, length)

    def local(self, config: ModelConfig, block: dict) -> dict:
        """Returns the weights of a block with those of KEY_VALUE sliced to this device's head.

        The gradient of a replicated weight is zero outside of this device's columns, so its sum
        over the devices has the sum over the copies of each head.
        """
        if self.kv_copies == 1:
            return block
        # Consecutive devices compute the same key/value head.
        heads = lax.axis_size(self.axis) // self.kv_copies
        head = lax.axis_index(self.axis) // self.kv_copies

        def columns(leaves, path, leaf):
            # A norm of all heads is a dict of arrays that begin with them.
            known = leaves.get(getattr(path[-1], "name", ""))
            axis = 0 if hasattr(path[-1], "key") else known and known.output_dim
            if axis is None:
                return leaf
            length = leaf.shape[axis] // heads
            return lax.dynamic_slice_in_dim(leaf, head * length, length, axis)

        sliced = {
            module: jax.tree_util.tree_map_with_path(
                functools.partial(columns, config.linear(module).leaves | {BIAS_NAME: BIAS}),
                block[module],
            )
            for module in (*KEY_VALUE, KEY_NORMS)
            if module in block
        }
        return {**block, **sliced}

    def sum_copies(self, gradient: jax.Array) -> jax.Array:
        """Sums a gradient of `k` or `v` over the devices that compute the same head."""
        if self.kv_copies == 1:
            return gradient
        devices = range(lax.axis_size(self.axis))
        groups = [list(devices[i : i + self.kv_copies]) for i in devices[:: self.kv_copies]]
        return lax.psum(gradient, self.axis, axis_index_groups=groups)


UNSHARDED = Shard()
"""The unsharded model."""
