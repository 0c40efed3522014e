"""Tiles of one group's columns, copied between HBM and double buffers in VMEM.

A group's columns are runs at a constant stride.  A `BlockSpec` can describe one run, but not one
array that is written in several runs per step.  So all activations are copied explicitly: one copy
per run, one wait per tile.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


class Columns(NamedTuple):
    """The columns of each group on one side of a weight.

    Attributes:
      groups: number of groups; run r of the side belongs to group r % groups.
      run: consecutive features of one group.
      width: features of one group.
    """

    groups: int
    run: int
    width: int

    @property
    def features(self) -> int:
        """Features of the side."""
        return self.groups * self.width

    def divides(self, tile: int) -> bool:
        """Return whether tiles of this many features are whole runs, or equal parts of runs."""
        return self.width % tile == 0 and (tile % self.run == 0 or self.run % tile == 0)

    def runs(self, group: Any, number: Any, tile: int) -> Iterator[tuple[Any, int, int]]:
        """Yield (column, offset in the tile, features) of each run in tile `number` of a group."""
        length = min(self.run, tile)
        for offset in range(0, tile, length):
            run, start = number * (tile // length) + offset // length, 0
            if length < self.run:
                run, start = run // (self.run // length), run % (self.run // length) * length
            yield (run * self.groups + group) * self.run + start, offset, length


class Grid(NamedTuple):
    """The steps of a kernel: (cores, units per core, token tiles), tokens innermost.

    A unit is a feature tile of a group.  Cores share the units if they can share them equally.

    Attributes:
      tokens: rows of the activations.
      token_tile: rows of a step; the last tile overlaps the one before if it is not whole.
      groups: number of groups.
      tiles: feature tiles of a group.
      cores: cores of the device.
    """

    tokens: int
    token_tile: int
    groups: int
    tiles: int
    cores: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """The Pallas grid."""
        units = self.groups * self.tiles
        cores = self.cores if units % self.cores == 0 else 1
        return cores, units // cores, pl.cdiv(self.tokens, self.token_tile)

    @property
    def steps(self) -> int:
        """Steps of one core."""
        return self.shape[1] * self.shape[2]

    def unit(self, core: Any, number: Any) -> tuple[Any, Any]:
        """Return (group, feature tile) of a core's unit."""
        number = core * self.shape[1] + number
        if self.tiles == 1:
            return number, 0
        return lax.div(number, self.tiles), lax.rem(number, self.tiles)

    def place(self, core: Any, step: Any) -> tuple[Any, Any, Any]:
        """Return (group, feature tile, first token) of a core's step."""
        token_tiles = self.shape[2]
        unit = self.unit(core, lax.div(step, token_tiles))
        return *unit, self.first_token(lax.rem(step, token_tiles))

    def first_token(self, token_tile: Any) -> Any:
        """Return the first row of a token tile."""
        first = token_tile * self.token_tile
        if self.tokens % self.token_tile:
            first = jnp.minimum(first, self.tokens - self.token_tile)
        return first


class Window(NamedTuple):
    """Two VMEM buffers of [token_tile, tile], filled from or written to an HBM array.

    Attributes:
      grid: steps of the kernel.
      columns: columns of each group.
      tiled: whether the grid's feature tiles cut these columns; else a tile is a whole group.
      core: this core.
      hbm: [tokens, features].
      buffers: [2, token_tile, tile].
      semaphores: one per buffer.
    """

    grid: Grid
    columns: Columns
    tiled: bool
    core: Any
    hbm: Any
    buffers: Any
    semaphores: Any

    @staticmethod
    def scratch(grid: Grid, tile: int, dtype) -> list:
        """Return the scratch shapes of the last two fields."""
        shape = (2, grid.token_tile, tile)
        return [pltpu.VMEM(shape, dtype), pltpu.SemaphoreType.DMA((2,))]

    def at(self, step: Any) -> Any:
        """Return the VMEM ref of a step."""
        return self.buffers.at[lax.rem(step, 2)]

    def fetch(self, step: Any) -> None:
        """Start the copies into VMEM for a step of this core, if it exists."""

        @pl.when(step < self.grid.steps)
        def _():
            for hbm, vmem in self._runs(step):
                pltpu.make_async_copy(hbm, vmem, self.semaphores.at[lax.rem(step, 2)]).start()

    def send(self, step: Any) -> None:
        """Start the copies of a step's results to HBM."""
        for hbm, vmem in self._runs(step):
            pltpu.make_async_copy(vmem, hbm, self.semaphores.at[lax.rem(step, 2)]).start()

    def wait(self, step: Any) -> None:
        """Wait for the copies of a step; all runs signal one semaphore by their bytes."""
        buffer = self.at(step)
        pltpu.make_async_copy(buffer, buffer, self.semaphores.at[lax.rem(step, 2)]).wait()

    def reuse(self, step: Any) -> Any:
        """Return the ref for a step's results, once the copies of step - 2 are complete."""

        @pl.when(step >= 2)
        def _():
            self.wait(step - 2)

        return self.at(step)

    def drain(self, step: Any) -> None:
        """Wait for the last copies to HBM at the core's last step."""

        @pl.when(step == self.grid.steps - 1)
        def _():
            if self.grid.steps > 1:
                self.wait(step - 1)
            self.wait(step)

    def _runs(self, step):
        group, number, first = self.grid.place(self.core, step)
        rows = pl.ds(pl.multiple_of(first, 16), self.grid.token_tile)
        tile = self.buffers.shape[2]
        vmem = self.at(step)
        for column, offset, length in self.columns.runs(group, number if self.tiled else 0, tile):
            columns = pl.ds(pl.multiple_of(column, 128), length)
            yield self.hbm.at[rows, columns], vmem.at[:, pl.ds(offset, length)]


def current_step(grid: Grid) -> tuple[jax.Array, jax.Array]:
    """Return (core, this core's step), inside a kernel."""
    core, unit, i = (pl.program_id(axis) for axis in range(3))
    return core, unit * grid.shape[2] + i
