"""Assignment of a model's blocks to the stages of a pipeline."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from sparse_dataflow.files.errors import UserError


@dataclasses.dataclass(frozen=True)
class Division:
    """A model's blocks, divided into virtual stages; chunk c of stage s is number c * stages + s.

    Attributes:
      stages: number of pipeline stages.
      chunks: virtual stages per stage.
      layers: blocks of each virtual stage, in the model's order.
    """

    stages: int
    chunks: int
    layers: tuple[int, ...]

    @property
    def capacity(self) -> int:
        """Blocks that the arrays of every virtual stage have room for."""
        return max(self.layers)

    @property
    def chunk_layers(self) -> np.ndarray:
        """int32 [stages, chunks], number of blocks of each chunk."""
        return np.array(self.layers, np.int32).reshape(self.chunks, self.stages).T

    @property
    def block_indices(self) -> np.ndarray:
        """int32 [stages * chunks * capacity], index of each block by stage; -1 for padding."""
        first = np.concatenate([[0], np.cumsum(self.layers)[:-1]])
        # Virtual stage c * stages + s is chunk c of stage s: rows of the reshape are chunks.
        first = first.reshape(self.chunks, self.stages).T[..., None]
        number = np.arange(self.capacity)
        return np.where(number < self.chunk_layers[..., None], first + number, -1).reshape(-1)

    @property
    def in_order(self) -> bool:
        """Whether the order of the stages is the canonical order of the blocks."""
        return np.array_equal(self.block_indices, np.arange(len(self.block_indices)))


def divide(num_layers: int, stages: int, chunks: int = 1) -> Division:
    """Divides a model's blocks evenly over the virtual stages.

    The first ones get the remainder, because the last has the head.

    Args:
      num_layers: blocks of the model.
      stages: number of pipeline stages.
      chunks: virtual stages per stage.

    Raises:
      UserError: there are fewer blocks than virtual stages.
    """
    virtual_stages = stages * chunks
    if num_layers < virtual_stages:
        legal = ", ".join(str(n) for n in range(1, num_layers // chunks + 1)) or "fewer chunks"
        raise UserError(
            f"{num_layers} layers cannot be divided over stage:{stages} with {chunks} chunks per "
            f"stage; legal stages: {legal}."
        )
    each, remainder = divmod(num_layers, virtual_stages)
    layers = tuple(each + (number < remainder) for number in range(virtual_stages))
    return Division(stages, chunks, layers)


def part(division: Division, layers: range) -> Division:
    """Returns the division of some of the model's blocks, each of which stays at its stage."""
    # What both ranges have together, for each stage.
    ends = np.cumsum((0, *division.layers))
    counts = (
        max(0, min(stop, layers.stop) - max(start, layers.start))
        for start, stop in itertools.pairwise(ends.tolist())
    )
    return Division(division.stages, division.chunks, tuple(counts))


class Kind(NamedTuple):
    """Blocks that run the same program.

    Attributes:
      layer: (params, what is not trained, x, micro-batch) -> (x, metrics), of one
        block.
      group: index of the stacked arrays that have these blocks.
      recompute: whether the recomputation is an action of its own.
    """

    layer: Callable
    group: int = 0
    recompute: bool = False


def block_places(division: Division, kinds: Sequence[int], groups: Sequence[range]) -> np.ndarray:
    """Returns what each block of each chunk is, int32 [stages, chunks, capacity, 2].

    Args:
      division: of all blocks.
      kinds: kind of each block of the model, in order.
      groups: blocks of each group, whose arrays `to_stages` divides by `part`.

    Returns:
      (kind, index in the arrays of its group that its stage has); zeros for padding.
    """
    places = np.zeros((division.stages, division.chunks, division.capacity, 2), np.int32)
    by_group = [part(division, layers).block_indices for layers in groups]
    for place in np.ndindex(places.shape[:3]):
        stage, chunk, number = place
        block = int(division.block_indices.reshape(places.shape[:3])[place])
        if block < 0:
            continue
        group, layers = next((g, r) for g, r in enumerate(groups) if block in r)
        # A stage's array of a group has its own chunks and padding, so the index of a block in it
        # is not `number`: it is where the group's division put the block.
        stage_indices = by_group[group].reshape(division.stages, -1)[stage]
        index = np.flatnonzero(stage_indices == block - layers.start)[0]
        places[stage, chunk, number] = kinds[block], index
    return places


def to_stages(division: Division, blocks: object) -> Any:
    """Reorders leaves [num_layers, ...] to [stages * chunks * capacity, ...], stage by stage.

    Padding entries are copies of the first block; nothing reads them.
    """
    if division.in_order:
        return blocks
    indices = np.maximum(division.block_indices, 0)
    return jax.tree.map(lambda leaf: leaf[indices], blocks)


def from_stages(division: Division, blocks: object) -> Any:
    """Inverts `to_stages`."""
    if division.in_order:
        return blocks
    indices = division.block_indices
    # The sort puts the padding, which is -1, before block 0.
    order = np.argsort(indices, kind="stable")[np.sum(indices < 0) :]
    return jax.tree.map(lambda leaf: leaf[order], blocks)
