"""A mixture of experts in place of a block's MLP.

A router chooses the experts of each token.  The rows of an expert follow one another, padded to
whole tiles, and `ops.expert_matmul` multiplies them with its weights.

No array has tokens, experts and capacity as dimensions.  Shapes in names: N tokens, K experts of a
token, E experts, S rows, T tiles, D and F features.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sparse_dataflow.core.config.expert_rows import exchanged_rows
from sparse_dataflow.core.config.expert_rows import expert_rows as capacity
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import ROW_PARALLEL
from sparse_dataflow.core.config.remat import PROJECTION_OUTPUT
from sparse_dataflow.core.layouts.model_layouts import expert_layout
from sparse_dataflow.core.model.mlp import Mlp, activate, draw_mlp
from sparse_dataflow.core.model.projection import normal
from sparse_dataflow.core.ops.derivatives import broadcast_like, lookup
from sparse_dataflow.core.step_metrics import Load, Mean, Metric

MOST_ROWS = 128
"""Rows of the largest tile."""

TILES_PER_EXPERT = 4
"""Tiles of an expert of mean load; more tiles have fewer rows of padding, but smaller products."""


class Dispatch(NamedTuple):
    """Where rows come from.

    Attributes:
      choices_S: int32, the choice (token * K + k) of each row; N * K for padding.
      rows_NxK: int32, the row of each choice; S for a dropped one.
    """

    choices_S: jax.Array
    rows_NxK: jax.Array


def real_capacity(config: ModelConfig, experts_NxK: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the most rows of an expert for the tokens that are no padding, int32 [].

    Args:
      experts_NxK: int32, the experts of all tokens.
      tokens: int32 [], tokens that are no padding.
    """
    most = capacity(config, len(experts_NxK))
    if not config.expert_capacity:
        return jnp.int32(most)
    share = config.expert_capacity * experts_NxK.shape[1] / config.experts
    real = jnp.ceil(share * tokens).astype(jnp.int32)
    # Without padding it is exactly the static bound, which a product in float32 could miss by one.
    return jnp.where(tokens == len(experts_NxK), most, jnp.minimum(real, most))


def dispatch(
    config: ModelConfig,
    experts_NxK: jax.Array,
    count: int | None = None,
    most: jax.Array | None = None,
) -> tuple[Dispatch, jax.Array]:
    """Sorts the choices of tokens by expert, in the order of tokens, and pads to whole tiles.

    Args:
      experts_NxK: int32, the experts of tokens; a choice of expert `count` has no row.
      count: number of experts whose weights are there, all of the model if None.  Tiles have as
        many rows as with all.
      most: most rows of an expert, if fewer than for all tokens; see `real_capacity`.

    Returns:
      (Dispatch, int32 [T], ascending, the expert of each tile of S / T rows; the number of experts
      for a tile of padding alone).
    """
    bound, count = capacity(config, len(experts_NxK)), count or config.experts
    expected = experts_NxK.size * count // config.experts
    return _by_expert(experts_NxK, count, bound, expected, most)


def _by_expert(experts_NxK, count, bound, expected, most=None):
    """Returns `dispatch` to `count` experts; a choice of expert `count` has no row.

    Args:
      experts_NxK: int32, the experts of tokens.
      bound: most rows of an expert, which gives the number of tiles.
      expected: expected rows of all experts, which gives the rows of a tile.
      most: a smaller limit of the rows of an expert.
    """
    most = bound if most is None else most
    rows = tile_rows(expected, count)
    # The most tiles that choices can fill: each expert may leave rows - 1 rows of its last tile
    # empty.
    tiles = (experts_NxK.size + count * (rows - 1)) // rows
    tiles = min(tiles, count * -(-bound // rows))
    # A choice of `count` is past the counted length.
    sizes = jnp.bincount(experts_NxK.reshape(-1), length=count)
    # An expert fills whole tiles, so that a tile has one expert: at most rows - 1 rows of each are
    # empty.  The number of tiles is the static bound, as shapes cannot follow the data.
    tiles_E = -(-jnp.minimum(sizes, most) // rows)
    ends = jnp.cumsum(tiles_E)
    plan = _place(experts_NxK, sizes, most, rows * (ends - tiles_E), tiles * rows)
    # Tile i is of the first expert whose tiles end after i; of none, `count`, after the last.
    tiles_T = jnp.searchsorted(ends, jnp.arange(tiles), side="right")
    return plan, tiles_T.astype(jnp.int32)


def _place(experts_NxK, sizes, most, first_rows, total):
    """Returns the Dispatch to `total` rows whose rows of an expert follow its first row.

    Args:
      experts_NxK: int32, the experts of tokens; the number of experts for none.
      sizes: int32 [experts], choices of each expert.
      most: most rows of an expert; later choices are dropped.
      first_rows: int32 [experts].
      total: number of rows.
    """
    flat, choices = experts_NxK.reshape(-1), experts_NxK.size
    # Stable, so of more choices than an expert has rows the later tokens lose theirs.  A choice's
    # rank within its expert is its place less the choices of the experts before.
    order = jnp.argsort(flat, stable=True)
    expert = flat[order]
    rank = jnp.arange(choices) - (jnp.cumsum(sizes) - sizes)[expert]
    has_row = (rank < most) & (expert < len(sizes))
    row = jnp.where(has_row, first_rows[expert] + rank, total).astype(jnp.int32)
    return Dispatch(
        jnp.full(total, choices, jnp.int32).at[row].set(order, mode="drop"),
        jnp.zeros(choices, jnp.int32).at[order].set(row).reshape(experts_NxK.shape),
    )


def tile_rows(choices: int, experts: int) -> int:
    """Returns the rows of a tile: a power of 2, such that experts of mean load fill some tiles."""
    mean = choices // (TILES_PER_EXPERT * experts)
    return min(MOST_ROWS, 1 << max(0, mean.bit_length() - 1))


class Exchange(NamedTuple):
    """How rows travel between devices that have different experts; see `exchange`.

    Attributes:
      sent: rows of this device's tokens, equally many for each device in order.
      received: rows of this device's experts, of the rows that devices sent to it.
      tiles_T: see `dispatch`, with the experts of this device.
      axis: mesh axis of the devices.
    """

    sent: Dispatch
    received: Dispatch
    tiles_T: jax.Array
    axis: str

    def spread(self, x_NxD: jax.Array) -> jax.Array:
        """Returns the rows [S, D] of this device's experts, of the tokens of all devices."""
        return spread(self._travel(spread(x_NxD, self.sent)), self.received)

    def collect(self, y_SxD: jax.Array) -> jax.Array:
        """Returns the outputs [N, K, D] of the experts of this device's tokens."""
        return collect(self._travel(collect(y_SxD, self.received)[:, 0]), self.sent)

    def _travel(self, rows):
        # Its own inverse: block i of device j becomes block j of device i.
        return lax.all_to_all(rows, self.axis, 0, 0, tiled=True)


def exchange(
    config: ModelConfig, experts_NxK: jax.Array, axis: str, most: jax.Array | None = None
) -> Exchange:
    """Sends the choices of tokens to the devices of an axis, which has equally many experts each.

    Args:
      experts_NxK: int32, the experts of this device's tokens.
      axis: mesh axis of the enclosing `shard_map`.
      most: see `dispatch`.
    """
    devices, tokens = lax.axis_size(axis), len(experts_NxK)
    local, bound = config.experts // devices, capacity(config, tokens)
    rows = exchanged_rows(config, tokens, devices)
    sizes = jnp.bincount(experts_NxK.reshape(-1), length=config.experts)
    limit = bound if most is None else most
    # Every device gets the same number of rows from each other one, filled from the front:
    # collectives of jax have static shapes.  The counts travel too, and say which rows are real
    # and whose.
    kept = jnp.minimum(sizes, limit).reshape(devices, local)
    # Each device gets `rows` rows; within these the rows of its experts follow one another.
    first = jnp.cumsum(kept, 1) - kept + rows * jnp.arange(devices)[:, None]
    sent = _place(experts_NxK, sizes, limit, first.reshape(-1), devices * rows)
    ends = jnp.cumsum(lax.all_to_all(kept, axis, 0, 0, tiled=True), 1)
    # Row i from a device is of the first expert whose rows end after i; `local` for the empty rows.
    experts = jax.vmap(lambda e: jnp.searchsorted(e, jnp.arange(rows), side="right"))(ends)
    experts = experts.astype(jnp.int32).reshape(-1, 1)
    # The senders have applied the limit of an expert's rows, so nothing is dropped here.
    received, tiles = _by_expert(experts, local, experts.size, experts_NxK.size)
    return Exchange(sent, received, tiles, axis)


def spread(x_NxD: jax.Array, plan: Dispatch) -> jax.Array:
    """Returns rows [S, D]: the token of each choice, 0 in padding."""
    tokens_S = plan.choices_S // plan.rows_NxK.shape[1]
    return _spread(x_NxD, tokens_S, plan.rows_NxK)


@jax.custom_vjp
def _spread(x_NxD, tokens_S, rows_NxK):
    return _take(x_NxD, tokens_S)


# Scatters are slow on a CPU; each gradient is a gather by the other map instead.
_spread.defvjp(
    lambda x, tokens, rows: (_take(x, tokens), rows),
    lambda rows, dy: (_take(dy, rows).sum(1).astype(dy.dtype), None, None),
)


def collect(y_SxD: jax.Array, plan: Dispatch) -> jax.Array:
    """Returns the rows [N, K, D] of each token's choices, 0 for a dropped choice."""
    return _collect(y_SxD, plan.rows_NxK, plan.choices_S)


@jax.custom_vjp
def _collect(y_SxD, rows_NxK, choices_S):
    return _take(y_SxD, rows_NxK)


_collect.defvjp(
    lambda y, rows, choices: (_take(y, rows), choices),
    lambda choices, dy: (_take(dy.reshape(-1, dy.shape[-1]), choices), None, None),
)


def _take(rows, indices):
    """Rows at indices; 0 where an index is the number of rows."""
    return rows.at[indices].get(mode="fill", fill_value=0)


def auxiliary_loss(config: ModelConfig, metrics: Mapping[str, Any]) -> jax.Array:
    """Returns the sum over tokens of the auxiliary losses of a layer, or of all if stacked.

    Args:
      metrics: of a block with experts.  "balance_loss" is 1 for an even load; "router_z_loss" is
        the squared logsumexp of the logits, summed over groups of experts.
    """
    balance, z = metrics["balance_loss"].total, metrics["router_z_loss"].total
    return config.balance_loss * balance.sum() + config.router_z_loss * z.sum()


@jax.custom_vjp
def with_loss(x: jax.Array, loss: jax.Array) -> jax.Array:
    """Returns x; its gradient pass also differentiates `loss`, which is added to the final loss."""
    return x


with_loss.defvjp(lambda x, loss: (x, loss), lambda loss, dx: (dx, jnp.ones_like(loss)))


class Experts:
    """Experts, their router and the shared expert; see `ModelConfig`."""

    router: jax.Array

    def __init__(self, config: ModelConfig, weights: dict):
        """Takes the "experts" of `layer_weights`."""
        self.config = config
        vars(self).update(weights)
        if config.shared_expert:
            self.shared = SharedExpert(config, weights["shared"])

    def __call__(self, x_BxTxD, shard, real_BxT=None):
        """Applies the experts to gathered tokens.

        Args:
          shard: shard of the weights.
          real_BxT: bool, whether each token is no padding, which has no experts; None for all.

        Returns:
          (output of this device's tokens, metrics).
        """
        x_NxD = x_BxTxD.reshape(-1, x_BxTxD.shape[-1])
        real_N = None if real_BxT is None else real_BxT.reshape(-1)
        gates_NxK, experts_NxK, metrics = self.route(x_NxD, shard.row_axes, real_N)
        most = None
        if real_N is not None:
            most = real_capacity(self.config, experts_NxK, real_N.sum())
            # The number after the last expert: a choice of it gets no row.
            experts_NxK = jnp.where(real_N[:, None], experts_NxK, self.config.experts)
        if shard.expert_axis is None:
            sent, tiles_T = dispatch(self.config, experts_NxK, most=most)
            x_SxD = spread(x_NxD, sent)
            y_NxKxD = collect(self.products(x_SxD, tiles_T, shard), sent)
        else:
            plan = exchange(self.config, experts_NxK, shard.expert_axis, most)
            sent = plan.sent
            x_SxD = plan.spread(x_NxD)
            y_NxKxD = plan.collect(self.products(x_SxD, plan.tiles_T, shard))
        # A dropped choice has the number of rows as its row.
        lost_N = jnp.mean(sent.rows_NxK == len(sent.choices_S), axis=1, dtype=jnp.float32)
        count = metrics["balance_loss"].count
        metrics |= {"dropped": Mean(_sum(lost_N, real_N), count)}
        y_BxTxD = self.combine(gates_NxK, y_NxKxD, x_BxTxD, shard)
        return checkpoint_name(y_BxTxD, PROJECTION_OUTPUT), metrics

    def combine(self, gates_NxK, y_NxKxD, x_BxTxD, shard):
        """Sums the outputs of each token's experts, times their factors, and the shared expert."""
        y_NxD = jnp.einsum("nk,nkd->nd", gates_NxK, y_NxKxD)
        y_BxTxD = shard.reduce(y_NxD.astype(x_BxTxD.dtype).reshape(x_BxTxD.shape))
        if self.config.shared_expert:
            y_BxTxD += self.shared(x_BxTxD, shard)
        return y_BxTxD

    def products(self, x_SxD, tiles_T, shard):
        """Applies each expert to its rows, in the order of `tiles_T`; see `dispatch`."""
        products = [self._product("mlp_in", x_SxD, tiles_T, shard)]
        if self.config.gated_mlp:
            products.append(self._product("mlp_gate", x_SxD, tiles_T, shard))
        hidden_SxF = activate(self.config, *products)
        return self._product("mlp_out", hidden_SxF, tiles_T, shard)

    def _product(self, name, x_SxD, tiles_T, shard):
        """Applies a projection of each expert to its rows, in the dtype of x."""
        weight, bias = getattr(self, name).weight, getattr(self, name).bias
        if shard.axis is None and self.config.linear(name).weight.stores_blocks:
            layout = expert_layout(self.config, name)
            weight = weight.map_stored(lambda stored: dataclasses.replace(stored, layout=layout))
        y = weight.expert_products(x_SxD, tiles_T)
        if bias is not None:
            bias = lookup(shard.own_experts(bias), tiles_T)[:, None]
            if name in ROW_PARALLEL:  # A bias counts once in the sum over the shards.
                bias /= shard.devices
            tiles = y.reshape(len(tiles_T), -1, y.shape[-1])
            y = (tiles + broadcast_like(bias, tiles)).reshape(y.shape)
        return checkpoint_name(y, PROJECTION_OUTPUT)

    def route(self, x_NxD, row_axes=(), real_N=None):
        """Chooses the experts of tokens, in float32.

        Args:
          row_axes: mesh axes of the enclosing `shard_map` that share the batch.
          real_N: bool, the tokens that are counted; None for all.

        Returns:
          (float32 [N, K] factors of the experts' outputs, int32 [N, K] experts, metrics).
        """
        config = self.config
        # Rounded logits would choose other experts: TPUs and GPUs round float32 operands by
        # default.
        logits = jnp.matmul(
            x_NxD.astype(jnp.float32),
            self.router.astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
        size = config.experts // config.prototypes
        by_group = logits.reshape(len(logits), config.prototypes, size)
        probabilities = jax.nn.softmax(by_group)
        gates, chosen = lax.top_k(probabilities, config.top_k)
        # A single gate over its own sum is always 1, and the router would have no gradient.
        if config.top_k > 1 and not config.raw_gates:
            gates /= gates.sum(-1, keepdims=True)
        # [N, prototypes, top_k]: a group's choices are numbered within the group.
        experts = chosen + size * jnp.arange(config.prototypes)[:, None]
        z_N = jnp.square(jax.nn.logsumexp(by_group, axis=-1)).sum(-1)
        counted = experts
        if real_N is not None:
            # bincount drops what is past its length.
            counted = jnp.where(real_N[:, None, None], experts, config.experts)
        load = jnp.bincount(counted.reshape(-1), length=config.experts).astype(jnp.float32)
        # The load is that of all devices, and the loss linear in the probabilities: so the losses
        # of the devices add up.
        loads = lax.psum(load, row_axes) if row_axes else load
        share = loads / jnp.maximum(loads.sum(), 1)
        # Shares of choices times mean probabilities, times the experts of a group (Switch
        # Transformers, arXiv 2101.03961, equation 4).
        balance = size * jnp.sum(share * _sum(probabilities, real_N).reshape(-1))
        tokens = jnp.float32(len(logits)) if real_N is None else real_N.sum(dtype=jnp.float32)
        metrics: dict[str, Metric] = {
            "balance_loss": Mean(balance, tokens),
            "router_z_loss": Mean(_sum(z_N, real_N), tokens),
            "busiest_expert": Load(load),
        }
        flat = lambda a: a.reshape(len(logits), -1)  # noqa: E731
        return flat(gates), flat(experts), metrics


class SharedExpert(Mlp):
    """The expert of all tokens, and its gate if the config has one; see `ModelConfig`."""

    router: jax.Array

    def __call__(self, x_BxTxD, shard):
        """Applies the expert to gathered tokens; returns the output of this device's tokens."""
        y_BxTxD = self.mlp(x_BxTxD, shard)
        if not self.config.shared_gate:
            return y_BxTxD
        x_BxTxD = shard.slice(x_BxTxD, axis=1).astype(jnp.float32)
        router = self.router.astype(jnp.float32)
        logits = jnp.matmul(x_BxTxD, router, precision=lax.Precision.HIGHEST)
        return y_BxTxD * broadcast_like(jax.nn.sigmoid(logits), y_BxTxD)


def _sum(values, real_N):
    """Returns the sum over the first axis of the values of real tokens; of all if None."""
    if real_N is not None:
        values = jnp.where(real_N.reshape(-1, *[1] * (values.ndim - 1)), values, 0)
    return values.sum(0)


def draw_experts(config: ModelConfig, rngs: nnx.Rngs) -> dict:
    """Draws the parameters of the experts, their router and the shared expert, float32."""
    router = functools.partial(normal, rngs, scale=1 / math.sqrt(config.d_model))
    params = {"router": router((config.d_model, config.experts)), **draw_mlp(config, rngs, True)}
    if config.shared_expert:
        width = config.shared_expert * config.d_ff
        params["shared"] = draw_mlp(dataclasses.replace(config, d_ff=width), rngs)
        if config.shared_gate:
            params["shared"]["router"] = router((config.d_model, 1))
    return params
