"""Gradient norms of all blocks, stored or not, without storing a dense gradient."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.config.layer_groups import join_groups, split_groups
from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig
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
    """Returns the block norms of the dense gradient of the mean loss over the tokens.

    Runs one forward and one backward pass without weight gradients. The backward pass forms xᵀ dy
    of one projection of one layer at a time and keeps only its block norms.

    Args:
      model: model config.
      params: see `gpt`.
      tables: traced layout tables, see `gpt`.
      tokens: int32 [rows, sequence + 1].
      member: device whose params and tables these are.
      axes: axes of `shard_map` that shard the rows.

    Returns:
      {block-sparse projection: float32 [layers, in_blocks, out_blocks]}, the member's shard.
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
            {name: Probe(table, group_norms[name], axes) for name, table in group.items()}
            for group, group_norms in zip(split_groups(tables), norms, strict=True)
        ]
        return whole.loss(model, params, join_groups(probes), tokens, weights, member)

    norms = jax.grad(loss)(zeros)
    return {name: jnp.concatenate([group[name] for group in norms]) for name in norms[0]}


def probed_rows(training: TrainingConfig) -> int:
    """Returns the number of sequences to measure: a quarter of a micro-batch, at least one."""
    return max(1, training.batch // training.micro_batches // 4)
