"""Weight tiles streamed from HBM through a ring of buffers, and the dots that use them.

A line's tiles are copied in chunks of a few entries, directly from their slots in `values`.  Copies
of later chunks overlap with compute, also across lines and token tiles.  So VMEM holds a few chunks
however many blocks a line stores, and the weights are never padded, transposed or densified.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparse_dataflow.kernels.block_sparse_matmul import pallas_tpu_tables
from sparse_dataflow.kernels.block_sparse_matmul.tuning import StreamTiles


def pop_if(present: bool, refs: list) -> Any:
    """Pop the next of a kernel's refs if it is present, else return None."""
    return refs.pop(0) if present else None


def precision(dtype):
    """Return full precision for float32, which the matrix unit would round to bfloat16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


class StreamShape(NamedTuple):
    """The static shape of one weight's stream.

    Attributes:
      lines: lines of the weight's tables.
      chunks: chunks of a line.
      entries: weight tiles of a chunk.
      ratio: blocks along a tile's side.
      block: side of a stored block.
      ahead: chunks in VMEM at once.
      transposed: whether the blocks are used transposed.
    """

    lines: int
    chunks: int
    entries: int
    ratio: int
    block: int
    ahead: int
    transposed: bool

    @property
    def tile(self) -> int:
        """Side of a weight tile."""
        return self.ratio * self.block

    def scratch(self, dtype) -> list:
        """Return the scratch shapes of `Stream`'s last three fields (two if ratio is 1)."""
        shapes = [
            pltpu.VMEM((self.ahead, self.entries * self.ratio**2, self.block, self.block), dtype),
            pltpu.SemaphoreType.DMA((self.ahead,)),
        ]
        if self.ratio > 1:
            shapes.append(pltpu.VMEM((self.entries, self.tile, self.tile), dtype))
        return shapes


def stream_shape(
    values: jax.Array,
    tables: pallas_tpu_tables.TileTables,
    tiles: StreamTiles,
    lines: int,
    transposed: bool,
) -> tuple[StreamShape, pallas_tpu_tables.TileTables]:
    """Return a weight's stream shape, and its tables padded to whole chunks and `lines` lines."""
    tables = pallas_tpu_tables.padded(tables, lines, tiles.entries)
    count, entries, ratio, _ = tables.slot.shape
    chunks = entries // tiles.entries
    block = values.shape[1]
    shape = StreamShape(count, chunks, tiles.entries, ratio, block, tiles.ahead, transposed)
    return shape, tables


class Stream(NamedTuple):
    """A weight's stream inside a kernel.

    Attributes:
      shape: the static shape.
      passes: token tiles of this core; each reads the whole weight.
      count_ref: `TileTables.count`, flat, in SMEM.
      index_ref: `TileTables.index`, flat, in SMEM.
      slot_ref: `TileTables.slot`, flat, in SMEM.
      values_hbm: [nnz, block, block].
      buffers_ref: the ring of chunks.
      arrived: semaphores of the ring.
      tiles_ref: tiles assembled from blocks smaller than a tile.
    """

    shape: StreamShape
    passes: Any
    count_ref: Any
    index_ref: Any
    slot_ref: Any
    values_hbm: Any
    buffers_ref: Any
    arrived: Any
    tiles_ref: Any = None

    def start(self):
        """Start the first copies; call once, before the first line."""
        for number in range(self.shape.ahead - 1):
            self._start(number)

    def line(
        self, pass_number: Any, line: Any, x_ref: Any, rows: int, sum_ref: Any, finish: Callable
    ) -> None:
        """Multiply x by one line of the weight.

        Args:
          pass_number: the pass, from 0; call every line of every pass, in order.
          line: the line.
          x_ref: [tokens, features] in VMEM.
          rows: tokens of one dot.
          sum_ref: float32 [tokens, tile] scratch.
          finish: called with (slice of tokens, their float32 sums [rows, tile]).
        """
        shape = self.shape
        used = jnp.maximum(1, pl.cdiv(self.count_ref[line], shape.entries))

        def over_rows(body):
            @pl.loop(0, x_ref.shape[0] // rows)
            def _(r):
                body(pl.ds(pl.multiple_of(r * rows, rows), rows))

        @pl.loop(0, shape.chunks)
        def _(chunk):
            number = (pass_number * shape.lines + line) * shape.chunks + chunk
            self._start(number + shape.ahead - 1)
            self._copies(number, lambda copy: copy.wait())

            @pl.when(chunk < used)
            def _():
                weight = self._weight(number)

                def multiply(token_rows):
                    total = self._dot(x_ref, token_rows, weight, number)
                    if shape.chunks == 1:
                        finish(token_rows, total)
                        return
                    total = total + jnp.where(chunk == 0, 0.0, sum_ref[token_rows, :])

                    @pl.when(chunk + 1 < used)
                    def _():
                        sum_ref[token_rows, :] = total

                    @pl.when(chunk + 1 == used)
                    def _():
                        finish(token_rows, total)

                over_rows(multiply)

    def _first_entry(self, number):
        """Return the first table entry of a chunk."""
        return lax.rem(number, self.shape.lines * self.shape.chunks) * self.shape.entries

    def _copies(self, number, act):
        """Call `act` on the copy of each stored block of a chunk."""
        blocks = self.shape.entries * self.shape.ratio**2
        first = self._first_entry(number) * self.shape.ratio**2
        buffer = lax.rem(number, self.shape.ahead)

        @pl.loop(0, blocks)
        def _(p):
            slot = self.slot_ref[first + p]

            @pl.when(slot >= 0)
            def _():
                act(
                    pltpu.make_async_copy(
                        self.values_hbm.at[slot],
                        self.buffers_ref.at[buffer, p],
                        self.arrived.at[buffer],
                    )
                )

    def _start(self, number):
        @pl.when(number < self.passes * self.shape.lines * self.shape.chunks)
        def _():
            self._copies(number, lambda copy: copy.start())

    def _dot(self, x_ref, rows, weight, number):
        tile = self.shape.tile
        first = self._first_entry(number)
        gathered = [
            x_ref[rows, pl.ds(pl.multiple_of(self.index_ref[first + k] * tile, tile), tile)]
            for k in range(self.shape.entries)
        ]
        contraction = ((1,), (1 if self.shape.transposed else 0,))
        return lax.dot_general(
            jnp.concatenate(gathered, axis=1),
            weight,
            (contraction, ((), ())),
            precision=precision(weight.dtype),
            preferred_element_type=jnp.float32,
        )

    def _weight(self, number):
        """Return a chunk's tiles, concatenated along the contraction; zeros where not stored."""
        if self.shape.ratio == 1:
            tiles = [self._block(number, k) for k in range(self.shape.entries)]
        else:
            tiles = self._assembled(number)
        return jnp.concatenate(tiles, axis=1 if self.shape.transposed else 0)

    def _block(self, number, p):
        slot = self.slot_ref[self._first_entry(number) * self.shape.ratio**2 + p]
        stored = self.buffers_ref[lax.rem(number, self.shape.ahead), p]
        return jnp.where(slot >= 0, stored, 0)

    def _assembled(self, number):
        ratio, block = self.shape.ratio, self.shape.block
        side = [pl.ds(number * block, block) for number in range(ratio)]

        @pl.loop(0, self.shape.entries)
        def _(k):
            for gathered_block in range(ratio):
                for line_block in range(ratio):
                    place = (
                        (line_block, gathered_block)
                        if self.shape.transposed
                        else (gathered_block, line_block)
                    )
                    stored = self._block(number, (k * ratio + gathered_block) * ratio + line_block)
                    self.tiles_ref[k, side[place[0]], side[place[1]]] = stored

        return [self.tiles_ref[k] for k in range(self.shape.entries)]


class Rows(NamedTuple):
    """Whole operand rows of a token tile, copied from HBM into one or two buffers.

    Attributes:
      hbm: [tokens, features], tokens a multiple of a register's rows.
      buffers_ref: [1 or 2, tile tokens, features].
      arrived: one semaphore per buffer.
    """

    hbm: Any
    buffers_ref: Any
    arrived: Any

    @staticmethod
    def scratch(array, tokens: int, buffers: int) -> list:
        """Return the scratch shapes of the last two fields."""
        return [
            pltpu.VMEM((buffers, tokens, array.shape[1]), array.dtype),
            pltpu.SemaphoreType.DMA((buffers,)),
        ]

    def start(self, first):
        """Start the copy of this core's first tile, if there are two buffers."""
        if self.buffers_ref.shape[0] == 2:
            self._copy(first, 0, lambda copy: copy.start())

    def wait(self, first, i, count):
        """Wait for tile `first + i` of this core's `count` tiles, and start the next copy."""
        if self.buffers_ref.shape[0] == 1:
            self._copy(first + i, 0, lambda copy: copy.start())
            self._copy(first + i, 0, lambda copy: copy.wait())
            return
        self._copy(first + i, lax.rem(i, 2), lambda copy: copy.wait())

        @pl.when(i + 1 < count)
        def _():
            self._copy(first + i + 1, lax.rem(i + 1, 2), lambda copy: copy.start())

    def at(self, i):
        """Return the ref of this core's i-th tile."""
        return self.buffers_ref.at[lax.rem(i, self.buffers_ref.shape[0])]

    def _copy(self, number, buffer, act):
        """Call `act` on the copy of token tile `number`; the last tile may be shorter."""
        tile = self.buffers_ref.shape[1]
        whole_tiles, remainder = divmod(self.hbm.shape[0], tile)

        def copy(rows):
            return pltpu.make_async_copy(
                self.hbm.at[pl.ds(pl.multiple_of(number * tile, tile), rows)],
                self.buffers_ref.at[buffer, pl.ds(0, rows)],
                self.arrived.at[buffer],
            )

        if whole_tiles:

            @pl.when(number < whole_tiles)
            def copy_whole_tile():
                act(copy(tile))

        if remainder:

            @pl.when(number == whole_tiles)
            def copy_remainder():
                act(copy(remainder))
