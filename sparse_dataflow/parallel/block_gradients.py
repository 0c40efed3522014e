"""How large the gradient of every block is, stored or not, while no dense gradient is kept."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.models.groups import join_groups, split_groups
from sparse_dataflow.models.linear import Probe
from sparse_dataflow.parallel import whole


def block_gradient_norms(
    model: ModelConfig,
    params: dict,
    tables: dict,
    tokens: jax.Array,
    member: whole.Member = whole.ALONE,
    axes: tuple[str, ...] = (),
) -> dict[str, jax.Array]:
    """Norms of the dense gradient's blocks, of the mean loss over these tokens.

    One forward pass and one backward pass without weight gradients.  The backward meets one
    projection of one layer after the other; there xᵀ dy exists once, and only its blocks' norms
    stay.

    Args:
      model: its config.
      params: see `gpt`.
      tables: traced layout tables, see `gpt`.
      tokens: int32 [rows, sequence + 1].
      member: whose params and tables these are.
      axes: of `shard_map`, over which the rows are dealt out.

    Returns:
      {block-sparse projection: float32 [layers, in_blocks, out_blocks]}, a member its own.
    """
    zeros = [
        {
            name: jnp.zeros(
                (len(table.out_index), table.out_index.shape[1], table.in_index.shape[1]),
                jnp.float32,
            )
            for name, table in group.items()
        }
        for group in split_groups(tables)
    ]
    shares = math.prod(lax.axis_size(axis) for axis in axes)
    weights = jnp.full(tokens[:, 1:].shape, 1 / (shares * tokens[:, 1:].size), jnp.float32)

    def loss(norms):
        probes = [
            {name: Probe(table, own[name], axes) for name, table in group.items()}
            for group, own in zip(split_groups(tables), norms, strict=True)
        ]
        return whole.loss(model, params, join_groups(probes), tokens, weights, member)

    found = jax.grad(loss)(zeros)
    return {name: jnp.concatenate([own[name] for own in found]) for name in found[0]}


def probed_rows(training: TrainingConfig) -> int:
    """Sequences whose dense gradient is measured: a quarter of a micro-batch, at least one."""
    return max(1, training.batch // training.micro_batches // 4)
