"""Rows of a mixture of experts: sorted by expert, and sent to the devices of the experts.

No array has tokens, experts and capacity as dimensions.  Shapes in names: N tokens, K experts of a
token, S rows, T tiles.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.core.config.expert_capacity import capacity, exchanged_rows
from sparse_dataflow.core.config.model import ModelConfig

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
      config: the model.
      experts_NxK: int32, the experts of all tokens.
      tokens: int32 [], tokens that are no padding.
    """
    most = capacity(config, len(experts_NxK))
    if not config.expert_capacity:
        return jnp.int32(most)
    share = config.expert_capacity * experts_NxK.shape[1] / config.experts
    real = jnp.ceil(share * tokens).astype(jnp.int32)
    return jnp.where(tokens == len(experts_NxK), most, jnp.minimum(real, most))


def dispatch(
    config: ModelConfig,
    experts_NxK: jax.Array,
    count: int | None = None,
    most: jax.Array | None = None,
) -> tuple[Dispatch, jax.Array]:
    """Sorts the choices of tokens by expert, in the order of tokens, and pads to whole tiles.

    Args:
      config: the model.
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
      count: number of experts.
      bound: most rows of an expert, which gives the number of tiles.
      expected: expected rows of all experts, which gives the rows of a tile.
      most: a smaller limit of the rows of an expert.
    """
    most = bound if most is None else most
    rows = tile_rows(expected, count)
    tiles = (experts_NxK.size + count * (rows - 1)) // rows
    tiles = min(tiles, count * -(-bound // rows))
    sizes = jnp.bincount(experts_NxK.reshape(-1), length=count)
    tiles_E = -(-jnp.minimum(sizes, most) // rows)
    ends = jnp.cumsum(tiles_E)
    plan = _place(experts_NxK, sizes, most, rows * (ends - tiles_E), tiles * rows)
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
        return lax.all_to_all(rows, self.axis, 0, 0, tiled=True)


def exchange(
    config: ModelConfig, experts_NxK: jax.Array, axis: str, most: jax.Array | None = None
) -> Exchange:
    """Sends the choices of tokens to the devices of an axis, which has equally many experts each.

    Args:
      config: the model.
      experts_NxK: int32, the experts of this device's tokens.
      axis: mesh axis of the enclosing `shard_map`.
      most: see `dispatch`.
    """
    devices, tokens = lax.axis_size(axis), len(experts_NxK)
    local, bound = config.experts // devices, capacity(config, tokens)
    rows = exchanged_rows(config, tokens, devices)
    sizes = jnp.bincount(experts_NxK.reshape(-1), length=config.experts)
    limit = bound if most is None else most
    kept = jnp.minimum(sizes, limit).reshape(devices, local)
    first = jnp.cumsum(kept, 1) - kept + rows * jnp.arange(devices)[:, None]
    sent = _place(experts_NxK, sizes, limit, first.reshape(-1), devices * rows)
    ends = jnp.cumsum(lax.all_to_all(kept, axis, 0, 0, tiled=True), 1)
    experts = jax.vmap(lambda e: jnp.searchsorted(e, jnp.arange(rows), side="right"))(ends)
    experts = experts.astype(jnp.int32).reshape(-1, 1)
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
