"""Tile sizes of the Hopper kernels, and what they cost in shared memory."""

import dataclasses

CONSUMERS = 2
"""Warp groups that multiply, in each program."""

SLICE_ROWS = 64
"""Rows of one wgmma, and of a slice of results on its way out."""


@dataclasses.dataclass(frozen=True)
class ProductTiles:
    """Tiles of `y = xW` or `dx = dy Wᵀ`.

    Attributes:
      rows: tokens of one consumer, a multiple of 64.
      columns: width of the result's tile; divides the block.
      depth: features of one stage; divides the block.
      stages: stages of the ring.
      cluster: multiprocessors that share each stored block by multicast, 1 or 2.
      group: token tiles (of a cluster) that take a column together.
      slice_columns: width of a slice of results on its way out.
      slices: slices of a consumer in flight.
    """

    rows: int
    columns: int
    depth: int
    stages: int
    cluster: int
    group: int
    slice_columns: int
    slices: int


@dataclasses.dataclass(frozen=True)
class GradientTiles:
    """Tiles of dW.

    Attributes:
      side: largest side of the part of a block that one consumer sums, at most 128.
      width: blocks of one column that one consumer sums side by side.
      depth: tokens of one stage.
      stages: stages of the ring.
      splits: shares of the tokens that are summed apart.
      slice_bytes: bytes of a row of a slice of results on its way out.
      slices: slices of a consumer in flight.
    """

    side: int
    width: int
    depth: int
    stages: int
    splits: int
    slice_bytes: int
    slices: int
