"""Writes of dW's sums on a Hopper GPU, through shared memory by TMA."""

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sparse_dataflow.chips.hopper.tuning import SLICE_ROWS


class Results:
    """Writer of a unit's sums to their slots, slice by slice.

    Attributes:
      places: (block of the unit, first row, first column) of each slice.
      slots: slices in shared memory at once.
    """

    def __init__(self, plan, arrays, scratch, consumer, unit):
        self.plan, self.arrays, self.unit = plan, arrays, unit
        self.slices = scratch.results.at[consumer]
        self.slots, _, self.width = self.slices.shape
        # A unit with several blocks may skip copies, so pending copies cannot be counted.
        single_block = plan.tiles.width == plan.tiles.lines == 1
        self.pending = self.slots - 1 if single_block else 0
        self.places = [
            (block, row, column)
            for block in range(plan.tiles.width)
            for row in range(0, plan.rows, SLICE_ROWS)
            for column in range(0, plan.width, self.width)
        ]

    def write(self, totals):
        """Write the float32 sums [rows, width] of each of the unit's blocks."""
        for number, (block, row, column) in enumerate(self.places):
            value = totals[block][row : row + SLICE_ROWS, column : column + self.width]
            at = number % self.slots
            # The copy from this slot must have read it before it is overwritten.
            plgpu.wait_smem_to_gmem(self.pending, wait_read_only=True)
            self.slices[at] = value.astype(self.slices.dtype)
            # The copy engine sees writes to shared memory only after this.
            plgpu.commit_smem()
            self._store(number)

    def _store(self, number):
        """Start the copy of a slice to its block, if that is stored."""
        plan, unit = self.plan, self.unit
        block, row, column = self.places[number]
        offset = plan.x_tile(unit.block_rows[block], unit.tile_row)[1]
        line, column = divmod(column, plan.side)
        rows = pl.ds(unit.tile_row * plan.side + row, plan.height)
        columns = pl.ds(unit.tile_column * plan.side + column, self.width)
        smem = self.slices.at[number % self.slots, pl.ds(offset, plan.height)]
        which = block * plan.tiles.lines + line
        slot = unit.slot[which]

        @pl.when((slot >= 0) & (slot < plan.stored))
        def _():
            plgpu.copy_smem_to_gmem(smem, self.arrays.out.at[unit.target[which], rows, columns])
