"""Tiles of one group's columns, copied between HBM and double buffers in VMEM.

A group's columns are runs at a constant stride.  A `BlockSpec` can describe one run, but not one
array that is written in several runs per step.  So all activations are copied explicitly: one copy
per run, one wait per tile.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparse_dataflow.chips.tpu.matmul.tuning import LANES

Index = int | jax.Array
"""A number of the grid, traced inside a kernel."""


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

    def runs(self, group: Index, number: Index, tile: int) -> Iterator[tuple[Any, int, int]]:
        """Yield (column, offset in the tile, features) of each run in tile `number` of a group."""
        length = min(self.run, tile)
        for offset in range(0, tile, length):
            # A tile is several whole runs, or a part of one.  Example: 2 groups, runs of 256, tiles
            # of 128.  Tile 3 of group 1 is the second half of its run 1: column 3 * 256 + 128.
            run: Index = number * (tile // length) + offset // length
            start: Index = 0
            if length < self.run:
                run, start = run // (self.run // length), run % (self.run // length) * length
            yield (run * self.groups + group) * self.run + start, offset, length


class Grid(NamedTuple):
    """The steps of a kernel: (cores, units per core, token tiles), tokens innermost.

    A unit is a feature tile of a group.  Cores share the units if they can share them equally.

    Attributes:
      tokens: rows of the activations.
      token_tile: rows of a step; the last tile overlaps the one before if it is not whole.
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

    def unit(self, core: Index, number: Index) -> tuple[Index, Index]:
        """Return (group, feature tile) of a core's unit."""
        number = core * self.shape[1] + number
        if self.tiles == 1:
            return number, 0
        return lax.div(number, self.tiles), lax.rem(number, self.tiles)

    def place(self, core: Index, step: Index) -> tuple[Index, Index, Any]:
        """Return (group, feature tile, first token) of a core's step."""
        token_tiles = self.shape[2]
        unit = self.unit(core, lax.div(step, token_tiles))
        return *unit, self.first_token(lax.rem(step, token_tiles))

    def first_token(self, token_tile: Index) -> Any:
        """Return the first row of a token tile."""
        first = token_tile * self.token_tile
        if self.tokens % self.token_tile:
            # The last tile moves back, so that all tiles are whole.  Rows in two tiles are computed
            # twice with equal results, so the order of their writes does not matter.  Sums over
            # tokens need `zero_repeated_rows`, in one of the two factors.
            first = jnp.minimum(first, self.tokens - self.token_tile)
        return first

    def zero_repeated_rows(self, array: jax.Array, token_tile: Index) -> jax.Array:
        """Zero the rows of [token_tile, ...] that the last tile shares with the tile before."""
        if not self.tokens % self.token_tile:
            return array
        repeated = token_tile * self.token_tile - self.first_token(token_tile)
        return jnp.where(lax.broadcasted_iota(jnp.int32, array.shape, 0) >= repeated, array, 0)


class Window(NamedTuple):
    """A ring of VMEM buffers [token_tile, tile], filled from or written to an HBM array.

    Attributes:
      grid: steps of the kernel.
      columns: columns of each group.
      tiled: whether the grid's feature tiles cut these columns; else a tile is a whole group.
      core: this core.
      hbm: [tokens, features].
      buffers: [2 or 3, token_tile, tile].
      semaphores: one per buffer.
    """

    grid: Grid
    columns: Columns
    tiled: bool
    core: Index
    hbm: jax.Ref
    buffers: jax.Ref
    semaphores: jax.Ref

    @staticmethod
    def scratch(grid: Grid, tile: int, dtype, buffers: int = 2) -> list:
        """Return the scratch shapes of the last two fields."""
        shape = (buffers, grid.token_tile, tile)
        return [pltpu.VMEM(shape, dtype), pltpu.SemaphoreType.DMA((buffers,))]

    def at(self, step: Index) -> jax.Ref:
        """Return the VMEM ref of a step."""
        return self.buffers.at[self._buffer(step)]

    def fetch(self, step: Index) -> None:
        """Start the copies into VMEM for a step of this core, if it exists."""

        @pl.when(step < self.grid.steps)
        def _():
            for hbm, vmem in self._runs(step):
                pltpu.make_async_copy(hbm, vmem, self.semaphores.at[self._buffer(step)]).start()

    def send(self, step: Index) -> None:
        """Start the copies of a step's results to HBM."""
        for hbm, vmem in self._runs(step):
            pltpu.make_async_copy(vmem, hbm, self.semaphores.at[self._buffer(step)]).start()

    def wait(self, step: Index) -> None:
        """Wait for the copies of a step; all runs signal one semaphore by their bytes."""
        buffer = self.at(step)
        pltpu.make_async_copy(buffer, buffer, self.semaphores.at[self._buffer(step)]).wait()

    def reuse(self, step: Index) -> jax.Ref:
        """Return the ref for a step's results, once the copies of step - 2 are complete."""

        @pl.when(step >= 2)
        def _():
            self.wait(step - 2)

        return self.at(step)

    def drain(self, step: Index) -> None:
        """Wait for the last copies to HBM at the core's last step."""

        @pl.when(step == self.grid.steps - 1)
        def _():
            if self.grid.steps > 1:
                self.wait(step - 1)
            self.wait(step)

    def _buffer(self, step):
        return lax.rem(step, self.buffers.shape[0])

    def _runs(self, step):
        group, number, first = self.grid.place(self.core, step)
        # Copies must begin at whole tiles of memory; tokens and token tiles are multiples of 16.
        rows = pl.ds(pl.multiple_of(first, 16), self.grid.token_tile)
        tile = self.buffers.shape[2]
        vmem = self.at(step)
        for column, offset, length in self.columns.runs(group, number if self.tiled else 0, tile):
            columns = pl.ds(pl.multiple_of(column, LANES), length)
            yield self.hbm.at[rows, columns], vmem.at[:, pl.ds(offset, length)]


class TransposedWindow(NamedTuple):
    """A window of whole groups that is transposed in VMEM, one step ahead.

    The transposes of the next step overlap with the dots of this one.

    Attributes:
      window: the rows; with three buffers those of this step stay, with two they are overwritten.
      transposed: [2, width, token_tile].
    """

    window: Window
    transposed: jax.Ref

    @staticmethod
    def scratch(grid: Grid, width: int, dtype, buffers: int = 2) -> list:
        """Return the scratch shapes: of the window's last two fields, then of the last field."""
        transposed = pltpu.VMEM((2, width, grid.token_tile), dtype)
        return [*Window.scratch(grid, width, dtype, buffers), transposed]

    def at(self, step: Index) -> jax.Ref:
        """Return the transposed tile of a step."""
        return self.transposed.at[lax.rem(step, 2)]

    def advance(self, step: Index) -> None:
        """Wait for the rows of the next step, and start the copies of those after it."""
        window = self.window

        @pl.when(step == 0)
        def _():
            window.fetch(step)
            window.fetch(step + 1)
            window.wait(step)
            pl.loop(0, self._blocks)(lambda number: self._transpose(step, number))

        @pl.when(step + 1 < window.grid.steps)
        def _():
            window.wait(step + 1)

        # With two buffers this overwrites the rows of `step`.  They are not needed: they were
        # transposed during the step before.
        window.fetch(step + 2)

    def transpose_next(self, step: Index, part: Index, parts: int) -> None:
        """Transpose one of `parts` equal parts of the next step's rows; the last may repeat."""
        most = pl.cdiv(self._blocks, parts)
        for number in range(most):
            self._transpose(step + 1, jnp.minimum(part * most + number, self._blocks - 1))

    @property
    def _blocks(self):
        return self.transposed.shape[1] // LANES

    def _transpose(self, step, number):
        grid = self.window.grid
        columns = pl.ds(pl.multiple_of(number * LANES, LANES), LANES)
        rows = self.window.at(step)[:, columns]
        token_tile = lax.rem(step, grid.shape[2])
        # Zeroed once here, instead of in every dot over the tokens.
        self.at(step)[columns, :] = grid.zero_repeated_rows(rows, token_tile).T


def current_step(grid: Grid) -> tuple[jax.Array, jax.Array]:
    """Return (core, this core's step), inside a kernel."""
    core, unit, i = (pl.program_id(axis) for axis in range(3))
    return core, unit * grid.shape[2] + i


def over_rows(tokens: int, rows: int) -> Callable:
    """Return a decorator that calls a function with each slice of `rows` rows.

    The last slice overlaps the one before if `rows` does not divide `tokens`.
    """

    def call(body):
        @pl.loop(0, pl.cdiv(tokens, rows))
        def _(r):
            first = r * rows if tokens % rows == 0 else jnp.minimum(r * rows, tokens - rows)
            body(pl.ds(pl.multiple_of(first, 16), rows))

    return call
