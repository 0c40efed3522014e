"""How a consumer of the Hopper kernel of dW writes its sums: through shared memory, by TMA."""

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sparse_dataflow.kernels.block_sparse_matmul.tuning_hopper import SLICE_ROWS


class Results:
    """A unit's sums on their way to its slots, a slice at a time, added to what is there.

    Attributes:
      places: (block of the unit, first row, first column) of each slice.
      slots: slices in shared memory at once.
    """

    def __init__(self, plan, arrays, scratch, group, unit):
        self.plan, self.arrays, self.unit = plan, arrays, unit
        self.slices, self.arrived, self.group = scratch.results.at[group], scratch.arrived, group
        self.slots, _, self.width = self.slices.shape
        # Where a unit may lack a block, a slice may have no copy under way that could be counted.
        whole = plan.tiles.width == plan.tiles.lines == 1
        self.pending = self.slots - 1 if whole else 0
        self.places = [
            (block, row, column)
            for block in range(plan.tiles.width)
            for row in range(0, plan.rows, SLICE_ROWS)
            for column in range(0, plan.width, self.width)
        ]

    def begin(self):
        """Starts to read as much of the accumulator as shared memory holds."""
        if self.arrays.before is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for number in range(self.slots):
                self._load(number)

    def write(self, totals):
        """Writes float32 [rows, side] of each of the unit's blocks."""
        for number, (block, row, column) in enumerate(self.places):
            value = totals[block][row : row + SLICE_ROWS, column : column + self.width]
            at = number % self.slots
            if self.arrays.before is None:
                plgpu.wait_smem_to_gmem(self.pending, wait_read_only=True)
            else:
                plgpu.barrier_wait(self.arrived.at[self.group, at])
                value += self.slices[at]
            self.slices[at] = value.astype(self.slices.dtype)
            plgpu.commit_smem()
            self._store(number)
            following = number + self.slots - 1
            if self.arrays.before is not None and 0 < number and following < len(self.places):
                # The place of the slice before this one is free once that has been read.
                plgpu.wait_smem_to_gmem(min(self.pending, 1), wait_read_only=True)
                self._load(following)

    def _slice(self, number):
        """(which of the unit's slots, shared memory, rows and columns of the block)."""
        plan, unit = self.plan, self.unit
        block, row, column = self.places[number]
        _, above = plan.row_of(unit.block_rows[block], unit.row_part)
        line, column = divmod(column, plan.side)
        rows = pl.ds(unit.row_part * plan.side + row, plan.height)
        columns = pl.ds(unit.column_part * plan.side + column, self.width)
        smem = self.slices.at[number % self.slots, pl.ds(above, plan.height)]
        return block * plan.tiles.lines + line, smem, (rows, columns)

    def _load(self, number):
        last = self.arrays.before.shape[0] - 1
        which, smem, place = self._slice(number)
        plgpu.copy_gmem_to_smem(
            self.arrays.before.at[lax.clamp(0, self.unit.target[which], last), *place],
            smem,
            self.arrived.at[self.group, number % self.slots],
        )

    def _store(self, number):
        which, smem, place = self._slice(number)
        slot = self.unit.slot[which]

        @pl.when((slot >= 0) & (slot < self.plan.stored))
        def _():
            plgpu.copy_smem_to_gmem(smem, self.arrays.out.at[self.unit.target[which], *place])
