"""Which blocks of a model lie on which stage of a pipeline."""

import dataclasses
from typing import Any

import jax
import numpy as np

from sparse_dataflow.files.errors import UserError


@dataclasses.dataclass(frozen=True)
class Division:
    """A model's blocks, divided into parts; chunk c of stage s holds part c * stages + s.

    Attributes:
      stages: devices in a row.
      chunks: parts that each of them holds.
      layers: blocks of each part, in the model's order.
    """

    stages: int
    chunks: int
    layers: tuple[int, ...]

    @property
    def room(self) -> int:
        """Blocks that every part has room for."""
        return max(self.layers)

    @property
    def held(self) -> np.ndarray:
        """int32 [stages, chunks], blocks of each part."""
        return np.array(self.layers, np.int32).reshape(self.chunks, self.stages).T

    @property
    def places(self) -> np.ndarray:
        """int32 [stages * chunks * room], the block in each place, stage by stage; -1: none."""
        first = np.concatenate([[0], np.cumsum(self.layers)[:-1]])
        first = first.reshape(self.chunks, self.stages).T[..., None]
        number = np.arange(self.room)
        return np.where(number < self.held[..., None], first + number, -1).reshape(-1)


def divide(num_layers: int, stages: int, chunks: int = 1, layers: tuple[int, ...] = ()) -> Division:
    """The division of a model's blocks.

    Args:
      num_layers: blocks of the model.
      stages: devices in a row.
      chunks: parts that each of them holds.
      layers: blocks of each part, in the model's order; evenly where empty, what is left over going
        to the first parts, as the last has the head.

    Raises:
      UserError: if the blocks cannot be divided so.
    """
    parts = stages * chunks
    if num_layers < parts:
        legal = ", ".join(str(n) for n in range(1, num_layers // chunks + 1)) or "fewer chunks"
        raise UserError(
            f"{num_layers} layers cannot be divided over stage:{stages} with {chunks} chunks a "
            f"stage; legal stages: {legal}."
        )
    if not layers:
        each, left = divmod(num_layers, parts)
        layers = tuple(each + (part < left) for part in range(parts))
    if len(layers) != parts or min(layers) < 1 or sum(layers) != num_layers:
        raise UserError(
            f"A division into {list(layers)} layers; legal: {parts} numbers of at least 1 whose "
            f"sum is {num_layers}."
        )
    return Division(stages, chunks, layers)


def to_stages(division: Division, blocks: Any) -> Any:
    """Leaves [num_layers, ...] -> [stages * chunks * room, ...], to be cut into stages.

    Places without a block hold copies of the first, which nothing reads.
    """
    places = division.places
    if np.array_equal(places, np.arange(len(places))):
        return blocks
    return jax.tree.map(lambda leaf: leaf[np.maximum(places, 0)], blocks)


def from_stages(division: Division, blocks: Any) -> Any:
    """The inverse of `to_stages`."""
    places = division.places
    if np.array_equal(places, np.arange(len(places))):
        return blocks
    order = np.argsort(places, kind="stable")[np.sum(places < 0) :]
    return jax.tree.map(lambda leaf: leaf[order], blocks)
