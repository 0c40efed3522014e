"""Sparser weights that a run begins with, fitted to the outputs before, on all processes."""

import itertools
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from sparse_dataflow.core import collectives
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.training.transitions import Batches
from sparse_dataflow.pruning import rebuild


def to_blocks(
    old: ModelConfig,
    params: dict,
    new: ModelConfig,
    batches: Sequence[np.ndarray],
    given: Mapping[str, Sequence[BlockLayout]] | None = None,
) -> tuple[ModelConfig, dict, dict[str, list]]:
    """Returns (dense model, its params, what is stored) of `rebuild.to_blocks`, equal on all
    processes."""
    result, stored = rebuild.to_blocks(old, params, new, batches, given)
    as_mask = lambda each: each.mask if isinstance(each, BlockLayout) else each  # noqa: E731
    # Each process has other rows of the batches.
    params, masks = collectives.broadcast_arrays(
        (result.params, {name: np.stack([*map(as_mask, each)]) for name, each in stored.items()})
    )
    equal = {
        name: [BlockLayout.from_mask(mask, new.linear(name).block) for mask in np.asarray(layers)]
        if new.linear(name).weight.stores_blocks
        else list(np.asarray(layers))
        for name, layers in masks.items()
    }
    return result.model, params, equal


def calibration(batches: Batches, count: int, micro_batches: int) -> list[np.ndarray]:
    """Returns this process's rows of the first `count` batches in parts: int32 [rows, T] each."""
    return [
        rows
        for batch in itertools.islice(batches, count)
        for rows in np.array_split(_local_rows(batch.tokens), micro_batches)
        if len(rows)
    ]


def _local_rows(array: np.ndarray | jax.Array) -> np.ndarray:
    """Returns the rows, in order, of which this process's devices have copies."""
    if isinstance(array, np.ndarray):
        return array
    # Replicas of rows have one start: each row counts once.
    shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])
