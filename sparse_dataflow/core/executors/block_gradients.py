"""Gradient norms of all blocks, stored or not, without storing a dense gradient."""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.layer_groups import join_groups, split_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import sharding, whole
from sparse_dataflow.core.model.partition import ArrayTree
from sparse_dataflow.core.model.projection import with_probes
from sparse_dataflow.core.model.stacks import layouts_by_name, map_arrays


def block_gradient_norms(
    model: ModelConfig,
    weights: dict,
    batch: Batch,
    rank: whole.Rank = whole.SINGLE_RANK,
    axes: tuple[str, ...] = (),
) -> dict[str, jax.Array]:
    """Returns the block norms of the dense gradient of the loss of a batch.

    Runs one forward and one backward pass without weight gradients. The backward pass forms xᵀ dy
    of one projection of one layer at a time and keeps only its block norms.

    Args:
      weights: see `stacks.weights_of`; layouts may change.
      batch: the rank's rows.
      rank: device whose weights these are.
      axes: axes of `shard_map` that shard the rows.

    Returns:
      {block-sparse projection: float32 [layers, in_blocks, out_blocks]}, the rank's shard.
    """
    zeros = [
        {name: jnp.zeros(layout.grid, jnp.float32) for name, layout in group.items()}
        for group in split_groups(layouts_by_name(weights))
    ]
    # Devices of "context" have other tokens of the same rows, so x^T dy is a sum over them too.
    summed = axes if rank.context is None else (*axes, rank.context.axis)
    shares = math.prod(lax.axis_size(axis) for axis in axes)

    def loss(norms):
        groups = [
            with_probes(group, each, summed, rank.shard)
            for group, each in zip(split_groups(weights["blocks"]), norms, strict=True)
        ]
        probed = {**weights, "blocks": join_groups(groups)}
        return whole.loss(model, probed, batch.weighted(shares), rank)

    # The loss does not depend on these zeros. A `Probed` weight returns the norms of xᵀ dy as their
    # gradient. So norms leave a scanned backward pass as gradients do.
    norms = jax.grad(loss)(zeros)
    return {name: jnp.concatenate([group[name] for group in norms]) for name in norms[0]}


def mask_gradient_norms(
    loss_and_gradients: Callable,
    model: ModelConfig,
    params: dict,
    rest: object,
    batch: Batch,
    features: np.ndarray | None = None,
) -> dict[str, jax.Array]:
    """Returns the norms of the dense gradient of masked weights, by the blocks of their masks.

    Args:
      loss_and_gradients: of an executor.
      params: what is trained, as placed.
      rest: what is not, as placed.
      batch: as the executor puts it.
      features: order of the residual stream's features as placed; None for that of the model.

    Returns:
      {masked projection: float32 [layers, in_blocks, out_blocks]}.
    """
    if not model.masked_projections:
        return {}
    how = whole.Accumulation()
    _, gradients = loss_and_gradients(model, params, opened_masks(rest), batch, how)
    groups = [
        norms_of_masks(model, _in_order(model, group, features))
        for group in split_groups(gradients["blocks"])
    ]
    return jax.tree.map(lambda *norms: jnp.concatenate(norms), *groups)


def _in_order(model, gradients, features):
    """Returns the gradients of masked projections with the features in the order of the model."""
    if features is None:
        return gradients
    # `features` is the order on the devices; sorting it gives the way back.
    back = np.argsort(features)

    def in_order(name, leaf, array):
        dim = sharding.residual_dim(model, f"blocks.{name}.{leaf}")
        return array if dim is None else jnp.take(array, back, axis=dim)

    return {
        name: {leaf: in_order(name, leaf, array) for leaf, array in gradients[name].items()}
        for name in model.masked_projections
    }


def opened_masks(rest: object) -> ArrayTree:
    """Returns what is not trained with masks of ones, of a model without adapters.

    What is not under a mask is zero, so they compute the same, and their gradient is that of dense
    weights.
    """
    return map_arrays(jnp.ones_like, rest)


def norms_of_masks(model: ModelConfig, gradients: Mapping[str, object]) -> dict[str, jax.Array]:
    """Returns the norms of the gradients of masked projections, by the blocks of their masks.

    Args:
      gradients: of a block or of several, with `opened_masks`.
    """
    specs = {name: model.linear(name) for name in model.masked_projections}
    return {n: jnp.sqrt(s.weight.gradient_scores(gradients[n], s)) for n, s in specs.items()}


class Portions(NamedTuple):
    """How the measured sequences are divided, so that a measurement fits in a micro-batch's memory.

    Attributes:
      rows: sequences of one program call.
      per_batch: calls whose sequences come from one training batch.
    """

    rows: int
    calls: int
    per_batch: int

    def divide(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the rows of each call; their targets count equally."""
        for done, batch in zip(range(0, self.calls, self.per_batch), batches):
            for call in range(min(self.per_batch, self.calls - done)):
                rows = slice(call * self.rows, (call + 1) * self.rows)
                yield batch.unweighted.map_rows(operator.itemgetter(rows))


def portions(training: TrainingConfig, sequences: int) -> Portions:
    """Returns the portions of at least `sequences` sequences: micro-batches, or fewer rows."""
    rows = min(sequences, training.batch // training.micro_batches)
    return Portions(rows, -(-sequences // rows), training.batch // rows)


def mean_norms(
    measure: Callable[[Batch], Mapping[str, np.ndarray]],
    batches: Iterable[Batch],
    division: Portions,
) -> dict[str, np.ndarray]:
    """Returns the root mean square of block gradient norms over portions of training batches.

    Norms of separate portions need no dense gradient between them.  Ranked by them, blocks capture
    as much of the gradient of many sequences as ranked by the norm of the summed gradient.

    Args:
      measure: batch -> {projection: norms}.
      batches: enough training batches.
    """
    totals: dict[str, np.ndarray] = {}
    for portion in division.divide(batches):
        for name, norm in jax.device_get(measure(portion)).items():
            # Squares add up over portions; in float64, as there may be many.
            totals[name] = totals.get(name, 0.0) + np.square(norm, dtype=np.float64)
    return {name: np.sqrt(total / division.calls) for name, total in totals.items()}
