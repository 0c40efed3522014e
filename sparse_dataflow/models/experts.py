"""A mixture of experts in place of a block's MLP.

A router chooses the experts of each token.  The rows of an expert follow one another, padded to
whole tiles (`expert_rows`), and `kernels.expert_matmul` multiplies them with its weights.

Shapes in names: N tokens, K experts of a token, E experts, S rows, T tiles, D and F features.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.projections import MLP, ROW_PARALLEL
from sparse_dataflow.config.sparsity import GROUPED_PATTERNS
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels.block_sparse_matmul import grouped
from sparse_dataflow.kernels.expert_matmul.api import expert_matmul
from sparse_dataflow.kernels.hadamard.api import hadamard
from sparse_dataflow.models.expert_rows import (
    collect,
    dispatch,
    exchange,
    real_capacity,
    spread,
)
from sparse_dataflow.models.linear import PROJECTION_OUTPUT, normal, projection_layout
from sparse_dataflow.models.mlp import Mlp, activate, gain
from sparse_dataflow.models.shard import WHOLE, Shard
from sparse_dataflow.sparsity.layout import BlockLayout, Groups, LayoutTables

ROUTER = "router"
"""Leaf of the router's weight, which computes in float32 whatever the compute dtype."""


class Routing(NamedTuple):
    """What the router of one layer did, as means over tokens that are no padding.

    Attributes:
      balance: float32 [], load-balance loss: 1 for an even load.
      z: float32 [], z-loss: squared logsumexp of the logits, summed over groups of experts.
      load: float32 [experts], share of all choices that each expert has; its sum is 1.
      dropped: float32 [], share of all choices beyond the experts' capacity.
    """

    balance: jax.Array
    z: jax.Array
    load: jax.Array
    dropped: jax.Array

    def loss(self, config: ModelConfig) -> jax.Array:
        """Returns the auxiliary loss of a layer, or of all if stacked."""
        return config.balance_loss * self.balance.sum() + config.router_z_loss * self.z.sum()


@jax.custom_vjp
def with_loss(x: jax.Array, loss: jax.Array) -> jax.Array:
    """Returns x; its gradient pass also differentiates `loss`, which is added to the final loss."""
    return x


with_loss.defvjp(lambda x, loss: (x, loss), lambda loss, dx: (dx, jnp.ones_like(loss)))


class Experts(nnx.Module):
    """Experts, their router and the shared expert; see `ModelConfig`."""

    mlp_gate: "ExpertLinear"
    mlp_in: "ExpertLinear"
    mlp_out: "ExpertLinear"

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        scale = 1 / math.sqrt(config.d_model)
        self.router = nnx.Param(normal(rngs, (config.d_model, config.experts), scale))
        for name in config.projections:
            if name in MLP:
                setattr(self, name, ExpertLinear(config, name, rngs=rngs))
        if config.shared_expert:
            self.shared = Mlp(config, rngs=rngs)
        self.config = config

    def __call__(self, x_BxTxD, tables, shard, real_BxT=None):
        """Applies the experts to gathered tokens.

        Args:
          x_BxTxD: the tokens.
          tables: tables of the layer.
          shard: shard of the parameters.
          real_BxT: bool, whether each token is no padding, which has no experts; None for all.

        Returns:
          (output of this device's tokens, Routing).
        """
        x_NxD = x_BxTxD.reshape(-1, x_BxTxD.shape[-1])
        real_N = None if real_BxT is None else real_BxT.reshape(-1)
        gates_NxK, experts_NxK, routing = self.route(x_NxD, shard.row_axes, real_N)
        most = None
        if real_N is not None:
            most = real_capacity(self.config, experts_NxK, real_N.sum())
            experts_NxK = jnp.where(real_N[:, None], experts_NxK, self.config.experts)
        if shard.expert_axis is None:
            sent, tiles_T = dispatch(self.config, experts_NxK, most=most)
            x_SxD = spread(x_NxD, sent)
            y_NxKxD = collect(self.products(x_SxD, tiles_T, tables, shard), sent)
        else:
            plan = exchange(self.config, experts_NxK, shard.expert_axis, most)
            sent = plan.sent
            x_SxD = plan.spread(x_NxD)
            y_NxKxD = plan.collect(self.products(x_SxD, plan.tiles_T, tables, shard))
        lost_N = jnp.mean(sent.rows_NxK == len(sent.choices_S), axis=1, dtype=jnp.float32)
        dropped = lost_N.mean() if real_N is None else _mean(lost_N, real_N)
        y_BxTxD = self.combine(gates_NxK, y_NxKxD, x_BxTxD, tables, shard)
        return checkpoint_name(y_BxTxD, PROJECTION_OUTPUT), routing._replace(dropped=dropped)

    def combine(self, gates_NxK, y_NxKxD, x_BxTxD, tables, shard):
        """Sums the outputs of each token's experts, times their factors, and the shared expert."""
        y_NxD = jnp.einsum("nk,nkd->nd", gates_NxK, y_NxKxD)
        y_BxTxD = shard.reduce(y_NxD.astype(x_BxTxD.dtype).reshape(x_BxTxD.shape))
        if self.config.shared_expert:
            y_BxTxD += self.shared.mlp(x_BxTxD, tables, shard)
        return y_BxTxD

    def products(self, x_SxD, tiles_T, tables, shard):
        """Applies each expert to its rows, in the order of `tiles_T`; see `dispatch`."""
        products = [self.mlp_in(x_SxD, tiles_T, tables.get("mlp_in"), shard)]
        if self.config.gated_mlp:
            products.append(self.mlp_gate(x_SxD, tiles_T, tables.get("mlp_gate"), shard))
        hidden_SxF = activate(self.config, *products)
        return self.mlp_out(hidden_SxF, tiles_T, tables.get("mlp_out"), shard)

    def route(self, x_NxD, row_axes=(), real_N=None):
        """Chooses the experts of tokens, in float32.

        Args:
          x_NxD: the tokens.
          row_axes: mesh axes of the enclosing `shard_map` that share the batch.
          real_N: bool, the tokens that the Routing counts; None for all.

        Returns:
          (float32 [N, K] factors of the experts' outputs, int32 [N, K] experts, Routing without
          dropped choices).
        """
        config = self.config
        logits = jnp.matmul(
            x_NxD.astype(jnp.float32),
            self.router[...].astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
        size = config.experts // config.prototypes
        by_group = logits.reshape(len(logits), config.prototypes, size)
        probabilities = jax.nn.softmax(by_group)
        gates, chosen = lax.top_k(probabilities, config.top_k)
        if config.top_k > 1:
            gates /= gates.sum(-1, keepdims=True)
        experts = chosen + size * jnp.arange(config.prototypes)[:, None]
        z_N = jnp.square(jax.nn.logsumexp(by_group, axis=-1)).sum(-1)
        # The loss of all devices is that of the whole batch: it is linear in the probabilities.
        if real_N is None:
            load = jnp.bincount(experts.reshape(-1), length=config.experts) / experts.size
            even = lax.pmean(load, row_axes) if row_axes else load
            mean, z = probabilities.mean(0).reshape(-1), z_N.mean()
        else:
            mine = jnp.where(real_N[:, None, None], experts, config.experts).reshape(-1)
            sizes = jnp.bincount(mine, length=config.experts).astype(jnp.float32)
            load = sizes / jnp.maximum(sizes.sum(), 1)
            all_sizes = lax.psum(sizes, row_axes) if row_axes else sizes
            even = all_sizes / jnp.maximum(all_sizes.sum(), 1)
            mean, z = _mean(probabilities, real_N).reshape(-1), _mean(z_N, real_N)
        routing = Routing(size * jnp.sum(even * mean), z, load, jnp.zeros(()))
        flat = lambda a: a.reshape(len(logits), -1)  # noqa: E731
        return flat(gates), flat(experts), routing


def _mean(values, real_N):
    """Returns the mean over the first axis of the values of real tokens; 0 if there are none."""
    real = real_N.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.where(real, values, 0).sum(0) / jnp.maximum(real_N.sum(), 1)


class ExpertLinear(nnx.Module):
    """A projection of every expert: y = x W + b, W dense or in equal groups of stored blocks.

    Parameters, all float32, as those of `Linear` with an axis of experts before: kernel, or values,
    and bias.  Each is drawn as the weight of a `Linear` is.
    """

    def __init__(self, config: ModelConfig, projection: str, *, rngs: nnx.Rngs):
        spec, (inputs, outputs) = config.linear(projection), config.projection_shape(projection)
        self.layout = expert_layout(config, projection) if spec.kind == "block_sparse" else None
        self.hadamard = spec.hadamard
        self.row_parallel = projection in ROW_PARALLEL
        scale = gain(config, projection)
        if self.layout is None:
            shape: tuple[int, ...] = (config.experts, inputs, outputs)
            self.kernel = nnx.Param(normal(rngs, shape, scale / math.sqrt(inputs)))
        else:
            block = self.layout.block
            shape = (config.experts, self.layout.nnz, block, block)
            fan_in = inputs * self.layout.density
            self.values = nnx.Param(normal(rngs, shape, scale / math.sqrt(fan_in)))
        if projection in config.biases:
            self.bias = nnx.Param(jnp.zeros((config.experts, outputs)))

    def __call__(
        self,
        x_SxD: jax.Array,
        tiles_T: jax.Array,
        tables: LayoutTables | None,
        shard: Shard = WHOLE,
    ) -> jax.Array:
        """Applies each expert to its rows, in the dtype of x.

        Args:
          x_SxD: rows in the order of `tiles_T`.
          tiles_T: see `expert_rows.dispatch`.
          tables: tables of a block-sparse projection, which a tensor-parallel shard reads.
          shard: shard of the parameters.
        """
        if self.layout is None:
            weight = self.kernel[...].astype(x_SxD.dtype)[:, None]
            y = expert_matmul(x_SxD[:, None], weight, tiles_T)[:, 0]
        else:
            x = hadamard(x_SxD, self.hadamard) if self.hadamard else x_SxD
            if shard.axis is None:
                tables = self.layout.tables()._replace(groups=self.layout.groups)
            y = _grouped_matmul(x, self.values[...].astype(x.dtype), tiles_T, tables)
        if hasattr(self, "bias"):
            bias = shard.own_experts(self.bias[...]).astype(y.dtype)[tiles_T, None]
            if self.row_parallel:  # A bias counts once in the sum over the shards.
                bias /= shard.devices
            y = (y.reshape(len(tiles_T), -1, y.shape[-1]) + bias).reshape(y.shape)
        return checkpoint_name(y, PROJECTION_OUTPUT)


def _grouped_matmul(x, values, tiles, tables):
    """[S, in] x [E, nnz, block, block] -> [S, out]: each group of inputs times its weight."""
    groups, block = tables.groups, values.shape[-1]
    weights = grouped.group_values(values, tables, groups)
    x = grouped.own_inputs(x, tables, groups, block)
    by_group = grouped.split(x, groups.count, groups.in_run * block).swapaxes(1, 2)
    y = expert_matmul(by_group.reshape(len(x), groups.count, -1), weights, tiles)
    y = y.reshape(len(x), groups.count, -1, groups.out_run * block).swapaxes(1, 2)
    return grouped.among_outputs(y.reshape(len(x), -1), tables, groups, block)


@functools.lru_cache(maxsize=64)
def expert_layout(config: ModelConfig, projection: str) -> BlockLayout:
    """Returns a layout of a block-sparse projection of the experts, with the groups of all layers.

    Raises:
      UserError: the layouts do not consist of equal groups that all layers share.
    """
    layouts = [projection_layout(config, projection, layer) for layer in range(config.num_layers)]
    groups: set[Groups | None] = {layout.groups for layout in layouts}
    if None in groups or len(groups) > 1:
        raise UserError(
            f"The experts of {projection} have layouts of the pattern "
            f"{config.linear(projection).pattern}, whose blocks are not equal groups, the same in "
            f"every layer; legal for experts: sparsity.pattern={' or '.join(GROUPED_PATTERNS)}, or "
            "sparsity.projections of attention alone."
        )
    return layouts[0]
