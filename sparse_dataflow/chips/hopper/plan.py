"""The order of a product's tiles in the Hopper kernels, and the stored blocks of each."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sparse_dataflow.chips.hopper.tuning import SLICE_ROWS, ProductTiles


class ProductPlan(NamedTuple):
    """The static shape of a product.

    Attributes:
      tiles: the tile sizes.
      block: side of a block.
      fan: positions of a line.
      columns: tiles along the result's width.
      row_tiles: tiles along the tokens, one per cluster.
      transposed: whether the blocks are used transposed.
      activation: name of one that is applied to the sum, or whose derivative is; None for none.
      derivative: whether the sum is multiplied by the activation's derivative.
      itemsize: bytes of a result element.
    """

    tiles: ProductTiles
    block: int
    fan: int
    columns: int
    row_tiles: int
    transposed: bool
    activation: str | None
    derivative: bool
    itemsize: int

    @property
    def total(self):
        """Number of tiles of the result."""
        return self.columns * self.row_tiles

    @property
    def tiles_per_block(self):
        """Tile columns of a block; 1 for merged lines."""
        return max(1, self.block // self.tiles.columns)

    @property
    def line_columns(self):
        """Columns of one line in a tile."""
        return self.tiles.columns // self.tiles.lines

    @property
    def num_sums(self):
        """Sums of a consumer: one per line, or one if a single wgmma takes its blocks."""
        return 1 if self.transposed else self.tiles.lines

    @property
    def sum_columns(self):
        """Columns of a sum."""
        return self.tiles.columns // self.num_sums

    @property
    def sum_shape(self):
        """Shape of a sum: [tokens, features]."""
        return self.tiles.rows, self.sum_columns

    def first_result(self, consumer):
        """Return the first (row, column) of a consumer's results inside the tile."""
        return consumer * self.tiles.rows, 0

    def line_block(self, block, line):
        """Return a line's ref inside a stage's blocks."""
        if self.transposed:
            return block.at[pl.ds(line * self.line_columns, self.line_columns)]
        return block.at[line]

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
        """First (row, column) of each slice of a consumer's results."""
        rows, columns = self.tiles.rows, self.tiles.columns
        return [
            (row, column)
            for row in range(0, rows, SLICE_ROWS)
            for column in range(0, columns, self.slice_columns)
        ]

    def place(self, number):
        """Return (row tile, column) of a tile: column by column within `tiles.group` row tiles."""
        # Tiles that run at once are then few rows by few columns, and share both in the L2 cache.
        # The last band may be lower than `tiles.group`.
        band_tiles = self.tiles.group * self.columns
        first_row = lax.div(number, band_tiles) * self.tiles.group
        height = lax.min(self.tiles.group, self.row_tiles - first_row)
        offset = lax.rem(number, band_tiles)
        return first_row + lax.rem(offset, height), lax.div(offset, height)


def count_stored(
    slot: jax.Ref, fan: int, width: int, line: jax.Array, last: jax.Array
) -> jax.Array:
    """Count the stored positions of a line; binary search only if the last one is padding.

    Args:
      slot: int32 [lines * fan * width] in device memory.
      fan: positions of a line.
      width: slots of a position.
      line: index of the line.
      last: a slot of the line's last position.
    """

    def halve(_, bounds):
        # Invariant: position `low` is stored (or -1), position `high` is padding.
        low, high = bounds
        middle = lax.div(low + high, 2)
        stored = slot[(line * fan + middle) * width] >= 0
        return lax.select(stored, middle, low), lax.select(stored, high, middle)

    def search():
        # Bisection: the stored positions of a line come first, and their number is data.
        bounds = jnp.int32(-1), jnp.int32(fan - 1)
        return lax.fori_loop(0, fan.bit_length(), halve, bounds)[1]

    return lax.cond(last >= 0, lambda: jnp.int32(fan), search)
