"""Gradient norms of all blocks, stored or not, without storing a dense gradient."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_dataflow.core.config.layer_groups import join_groups, split_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model.projection import Probe
from sparse_dataflow.core.model.stacks import ModelWeights


def block_gradient_norms(
    model: ModelConfig,
    weights: ModelWeights,
    tokens: jax.Array,
    member: whole.Member = whole.ALONE,
    axes: tuple[str, ...] = (),
) -> dict[str, jax.Array]:
    """Returns the block norms of the dense gradient of the mean loss over the tokens.

    Runs one forward and one backward pass without weight gradients. The backward pass forms xᵀ dy
    of one projection of one layer at a time and keeps only its block norms.

    Args:
      weights: of the model, with layouts that may change.
      tokens: int32 [rows, sequence + 1].
      member: device whose weights these are.
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
        for group in split_groups(weights.tables)
    ]
    summed = axes if member.context is None else (*axes, member.context.axis)
    shares = math.prod(lax.axis_size(axis) for axis in axes)
    mean = jnp.full(tokens[:, 1:].shape, 1 / (shares * tokens[:, 1:].size), jnp.float32)

    def loss(norms):
        probes = [
            Probe.of(group, group_norms, summed, member.shard)
            for group, group_norms in zip(split_groups(weights.tables), norms, strict=True)
        ]
        probed = dataclasses.replace(weights, layouts=join_groups(probes))
        return whole.loss(model, probed, whole.Batch(tokens, mean), member)

    # The loss does not depend on these zeros. A `Probed` weight returns the norms of xᵀ dy as their
    # gradient. So norms leave a scanned backward pass as gradients do.
    norms = jax.grad(loss)(zeros)
    return {name: jnp.concatenate([group[name] for group in norms]) for name in norms[0]}


def mask_gradient_norms(
    loss_and_gradients: Callable, model: ModelConfig, weights: ModelWeights, tokens: jax.Array
) -> dict[str, jax.Array]:
    """Returns the norms of the dense gradient of masked weights, by the blocks of their masks.

    Args:
      loss_and_gradients: of an executor.
      weights: of the model, as placed.
      tokens: int32 [rows, sequence + 1].

    Returns:
      {masked projection: float32 [layers, in_blocks, out_blocks]}.
    """
    specs = {n: spec for n, spec in dict(model.linears).items() if spec.weight.has_mask}
    if not specs:
        return {}
    # What is not under a mask is zero, so under masks of ones the gradient is that of the dense
    # weight.
    ones = jax.tree.map(jnp.ones_like, weights.frozen)
    opened = dataclasses.replace(weights, frozen=ones)
    _, gradients = loss_and_gradients(model, opened, whole.Batch(tokens), whole.Accumulation())
    norms = {}
    for name, spec in specs.items():
        modules = [group[name] for group in split_groups(gradients["blocks"])]
        squares = [spec.weight.gradient_scores(module, spec) for module in modules]
        norms[name] = jnp.sqrt(jnp.concatenate(squares))
    return norms


class Portions(NamedTuple):
    """How the measured sequences are divided, so that a measurement fits in a micro-batch's memory.

    Attributes:
      rows: sequences of one program call.
      per_batch: calls whose sequences come from one training batch.
    """

    rows: int
    calls: int
    per_batch: int


def portions(training: TrainingConfig, sequences: int) -> Portions:
    """Returns the portions of at least `sequences` sequences: micro-batches, or fewer rows."""
    rows = min(sequences, training.batch // training.micro_batches)
    return Portions(rows, -(-sequences // rows), training.batch // rows)


def mean_norms(
    measure: Callable[[Any], Mapping[str, np.ndarray]],
    batches: Iterable[Any],
    division: Portions,
) -> dict[str, np.ndarray]:
    """Returns the root mean square of block gradient norms over portions of training batches.

    Norms of separate portions need no dense gradient between them.  Ranked by them, blocks capture
    as much of the gradient of many sequences as ranked by the norm of the summed gradient.

    Args:
      measure: int32 [rows, sequence + 1] tokens -> {projection: norms}.
      batches: int32 [batch, sequence + 1] tokens of enough batches.
    """
    totals: dict[str, np.ndarray] = {}
    rows, calls, per_batch = division
    for batch, tokens in zip(range(0, calls, per_batch), batches):
        for portion in range(min(per_batch, calls - batch)):
            norms = jax.device_get(measure(tokens[portion * rows : (portion + 1) * rows]))
            for name, norm in norms.items():
                totals[name] = totals.get(name, 0.0) + np.square(norm, dtype=np.float64)
    return {name: np.sqrt(total / calls) for name, total in totals.items()}
