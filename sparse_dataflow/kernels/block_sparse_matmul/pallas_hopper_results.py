"""Writes of dW's sums on a Hopper GPU, through shared memory by TMA."""

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sparse_dataflow.kernels.block_sparse_matmul.tuning_hopper import SLICE_ROWS


class Results:
    """Writer of a unit's sums to their slots, slice by slice, with an optional accumulator.

    Attributes:
      places: (block of the unit, first row, first column) of each slice.
      slots: slices in shared memory at once.
    """

    def __init__(self, plan, arrays, scratch, consumer, unit):
        self.plan, self.arrays, self.unit = plan, arrays, unit
        self.consumer, self.arrived = consumer, scratch.arrived
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

    def prefetch(self):
        """Start to load the accumulator's first slices, as many as shared memory holds."""
        if self.arrays.accumulator is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for number in range(self.slots):
                self._load(number)

    def write(self, totals):
        """Write the float32 sums [rows, width] of each of the unit's blocks."""
        for number, (block, row, column) in enumerate(self.places):
            value = totals[block][row : row + SLICE_ROWS, column : column + self.width]
            at = number % self.slots
            if self.arrays.accumulator is None:
                plgpu.wait_smem_to_gmem(self.pending, wait_read_only=True)
            else:
                plgpu.barrier_wait(self.arrived.at[self.consumer, at])
                value += self.slices[at]
            self.slices[at] = value.astype(self.slices.dtype)
            plgpu.commit_smem()
            self._store(number)
            following = number + self.slots - 1
            if self.arrays.accumulator is not None and 0 < number and following < len(self.places):
                # The previous slice's memory is free once its copy has been read.
                plgpu.wait_smem_to_gmem(min(self.pending, 1), wait_read_only=True)
                self._load(following)

    def _slice(self, number):
        """Return (index of the unit's slot, shared memory, rows and columns of the block)."""
        plan, unit = self.plan, self.unit
        block, row, column = self.places[number]
        _, offset = plan.x_tile(unit.block_rows[block], unit.tile_row)
        line, column = divmod(column, plan.side)
        rows = pl.ds(unit.tile_row * plan.side + row, plan.height)
        columns = pl.ds(unit.tile_column * plan.side + column, self.width)
        smem = self.slices.at[number % self.slots, pl.ds(offset, plan.height)]
        return block * plan.tiles.lines + line, smem, (rows, columns)

    def _load(self, number):
        last = self.arrays.accumulator.shape[0] - 1
        which, smem, place = self._slice(number)
        plgpu.copy_gmem_to_smem(
            self.arrays.accumulator.at[lax.clamp(0, self.unit.target[which], last), *place],
            smem,
            self.arrived.at[self.consumer, number % self.slots],
        )

    def _store(self, number):
        which, smem, place = self._slice(number)
        slot = self.unit.slot[which]

        @pl.when((slot >= 0) & (slot < self.plan.stored))
        def _():
            plgpu.copy_smem_to_gmem(smem, self.arrays.out.at[self.unit.target[which], *place])
