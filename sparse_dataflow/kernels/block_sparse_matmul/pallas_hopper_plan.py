"""The order in which the Hopper kernels take the tiles of a product, and how much each reads."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sparse_dataflow.kernels.block_sparse_matmul.tuning_hopper import SLICE_ROWS, ProductTiles


class ProductPlan(NamedTuple):
    """What is fixed when a product is traced.

    Attributes:
      tiles: the tile sizes.
      block: side of a block.
      fan: positions of a line.
      columns: tiles of the result's width.
      row_tiles: tiles of tokens, each for a cluster.
      transposed: whether the blocks are used transposed.
      gelu: whether the sum passes a GELU.
      derivative: whether a GELU's derivative multiplies the sum.
      itemsize: bytes of a result.
    """

    tiles: ProductTiles
    block: int
    fan: int
    columns: int
    row_tiles: int
    transposed: bool
    gelu: bool
    derivative: bool
    itemsize: int

    @property
    def total(self):
        """Tiles of the result."""
        return self.columns * self.row_tiles

    @property
    def parts(self):
        """Tile columns of a block, or one of several lines side by side."""
        return max(1, self.block // self.tiles.columns)

    @property
    def share(self):
        """Columns of a tile that are one line's."""
        return self.tiles.columns // self.tiles.lines

    @property
    def pieces(self):
        """Sums of a tile: of each line, or transposed, where blocks lie as wgmma wants, of all."""
        return 1 if self.transposed else self.tiles.lines

    @property
    def piece(self):
        """Columns of a sum."""
        return self.tiles.columns // self.pieces

    def of_line(self, block, line):
        """What of a stage's blocks is a line's."""
        return block.at[pl.ds(line * self.share, self.share)] if self.transposed else block.at[line]

    @property
    def slice_columns(self):
        """Width of a slice of results."""
        return self.tiles.slice_columns(self.itemsize)

    @property
    def steps(self):
        """Stages of a block."""
        return self.block // self.tiles.depth

    @property
    def slices(self):
        """Places (row, column) of the slices in which a consumer's results are written."""
        return [
            (row, column)
            for row in range(0, self.tiles.rows, SLICE_ROWS)
            for column in range(0, self.tiles.columns, self.slice_columns)
        ]

    def place(self, number):
        """(row tile, column) of a tile: columns in turn, each for a whole group of row tiles."""
        of_group = self.tiles.group * self.columns
        first = lax.div(number, of_group) * self.tiles.group
        width = lax.min(self.tiles.group, self.row_tiles - first)
        rest = lax.rem(number, of_group)
        return first + lax.rem(rest, width), lax.div(rest, width)


def stored_of(slot: Any, fan: int, width: int, line: jax.Array, last: jax.Array) -> jax.Array:
    """Stored positions of a line; looked for only where its last one is padding.

    Args:
      slot: int32 [lines * fan * width] in device memory.
      fan: positions of a line.
      width: slots of a position.
      line: which line.
      last: a slot of its last position.
    """

    def halve(_, bounds):
        # Position `low` is stored or before the first, position `high` is padding.
        low, high = bounds
        middle = lax.div(low + high, 2)
        stored = slot[(line * fan + middle) * width] >= 0
        return lax.select(stored, middle, low), lax.select(stored, high, middle)

    def search():
        bounds = jnp.int32(-1), jnp.int32(fan - 1)
        return lax.fori_loop(0, fan.bit_length(), halve, bounds)[1]

    return lax.cond(last >= 0, lambda: jnp.int32(fan), search)
