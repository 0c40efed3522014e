"""Weight tiles streaming from HBM through a ring of buffers, and the dots that use them.

A line's tiles come in chunks of a few entries.  While one chunk is multiplied the next ones are on
their way, straight from their slots, over the ends of lines and token tiles; so VMEM holds a few
chunks of weights however many blocks a line stores, and no padding, transposed or dense copy of
the weights exists anywhere.
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


def ref_if(given: bool, refs: list) -> Any:
    """The next of a kernel's refs, which is removed; None where it was not given."""
    return refs.pop(0) if given else None


def precision(dtype):
    """Float32 products in full precision; the matrix unit would round to bfloat16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


class StreamShape(NamedTuple):
    """What of one weight's stream is known when a kernel is traced.

    Attributes:
      lines: lines of the weight's tables.
      chunks: chunks of a line.
      entries: weight tiles of a chunk.
      ratio: blocks along a tile.
      block: side of a stored block.
      ahead: chunks that VMEM holds at once.
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
        """Scratch memory of the stream: `Stream`'s last three fields (two where ratio is 1)."""
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
    """The stream of a weight, and its tables with multiples of `lines` lines and of a chunk."""
    tables = pallas_tpu_tables.padded(tables, lines, tiles.entries)
    count, entries, ratio, _ = tables.slot.shape
    chunks = entries // tiles.entries
    block = values.shape[1]
    shape = StreamShape(count, chunks, tiles.entries, ratio, block, tiles.ahead, transposed)
    return shape, tables


class Stream(NamedTuple):
    """A weight's stream inside a kernel.

    Attributes:
      shape: the static part.
      passes: how often this core reads the whole weight: its token tiles.
      count_ref: `TileTables.count`, flat, in SMEM.
      index_ref: `TileTables.index`.
      slot_ref: `TileTables.slot`.
      values_hbm: [nnz, block, block].
      buffers_ref: the ring.
      arrived: its semaphores.
      tiles_ref: tiles put together from blocks smaller than a tile.
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

    def begin(self):
        """Starts the first copies; once, before the first line."""
        for number in range(self.shape.ahead - 1):
            self._start(number)

    def line(
        self, turn: Any, line: Any, x_ref: Any, rows: int, sum_ref: Any, finish: Callable
    ) -> None:
        """x times one line of the weight.

        Args:
          turn: the pass, from 0; passes and their lines come in order, none left out.
          line: the line.
          x_ref: [tokens, features] in VMEM.
          rows: tokens of one dot.
          sum_ref: float32 [tokens, tile] scratch.
          finish: called with (rows, their float32 sums [rows, tile]).
        """
        shape = self.shape
        used = jnp.maximum(1, pl.cdiv(self.count_ref[line], shape.entries))

        def over_rows(body):
            @pl.loop(0, x_ref.shape[0] // rows)
            def _(r):
                body(pl.ds(pl.multiple_of(r * rows, rows), rows))

        @pl.loop(0, shape.chunks)
        def _(chunk):
            number = (turn * shape.lines + line) * shape.chunks + chunk
            self._start(number + shape.ahead - 1)
            self._copies(number, lambda copy: copy.wait())

            @pl.when(chunk < used)
            def _():
                weight = self._weight(number)

                def multiply(part):
                    total = self._dot(x_ref, part, weight, number)
                    if shape.chunks == 1:
                        finish(part, total)
                        return
                    total = total + jnp.where(chunk == 0, 0.0, sum_ref[part, :])

                    @pl.when(chunk + 1 < used)
                    def _():
                        sum_ref[part, :] = total

                    @pl.when(chunk + 1 == used)
                    def _():
                        finish(part, total)

                over_rows(multiply)

    def _place(self, number):
        """The first entry of a chunk."""
        return lax.rem(number, self.shape.lines * self.shape.chunks) * self.shape.entries

    def _copies(self, number, act):
        """`act` on the copy of each block that a chunk stores."""
        blocks = self.shape.entries * self.shape.ratio**2
        first = self._place(number) * self.shape.ratio**2
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
        first = self._place(number)
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
        """The chunk's tiles along the contraction; zero where no block is stored."""
        if self.shape.ratio == 1:
            parts = [self._block(number, k) for k in range(self.shape.entries)]
        else:
            parts = self._assembled(number)
        return jnp.concatenate(parts, axis=1 if self.shape.transposed else 0)

    def _block(self, number, p):
        slot = self.slot_ref[self._place(number) * self.shape.ratio**2 + p]
        stored = self.buffers_ref[lax.rem(number, self.shape.ahead), p]
        return jnp.where(slot >= 0, stored, 0)

    def _assembled(self, number):
        ratio, block = self.shape.ratio, self.shape.block
        side = [pl.ds(part * block, block) for part in range(ratio)]

        @pl.loop(0, self.shape.entries)
        def _(k):
            for other in range(ratio):
                for own in range(ratio):
                    place = (own, other) if self.shape.transposed else (other, own)
                    part = self._block(number, (k * ratio + other) * ratio + own)
                    self.tiles_ref[k, side[place[0]], side[place[1]]] = part

        return [self.tiles_ref[k] for k in range(self.shape.entries)]


class Rows(NamedTuple):
    """Whole rows of an operand for a tile of tokens, copied from HBM in one or two buffers.

    Attributes:
      hbm: [tokens, features], tokens a multiple of a register's rows.
      buffers_ref: [1 or 2, tile tokens, features].
      arrived: a semaphore of each buffer.
    """

    hbm: Any
    buffers_ref: Any
    arrived: Any

    @staticmethod
    def scratch(array, tokens: int, buffers: int) -> list:
        """Scratch memory: the last two fields."""
        return [
            pltpu.VMEM((buffers, tokens, array.shape[1]), array.dtype),
            pltpu.SemaphoreType.DMA((buffers,)),
        ]

    def begin(self, first):
        """Starts the copy of this core's first tile, where there is a second buffer."""
        if self.buffers_ref.shape[0] == 2:
            self._copy(first, 0, lambda copy: copy.start())

    def turn(self, first, i, turns):
        """Waits for tile `first + i`; the next of this core's `turns` is on its way meanwhile."""
        if self.buffers_ref.shape[0] == 1:
            self._copy(first + i, 0, lambda copy: copy.start())
            self._copy(first + i, 0, lambda copy: copy.wait())
            return
        self._copy(first + i, lax.rem(i, 2), lambda copy: copy.wait())

        @pl.when(i + 1 < turns)
        def _():
            self._copy(first + i + 1, lax.rem(i + 1, 2), lambda copy: copy.start())

    def at(self, i):
        """The tile of this core's turn i."""
        return self.buffers_ref.at[lax.rem(i, self.buffers_ref.shape[0])]

    def _copy(self, number, buffer, act):
        """`act` on the copy of token tile `number`; the last one may be shorter."""
        tile = self.buffers_ref.shape[1]
        whole, rest = divmod(self.hbm.shape[0], tile)

        def copy(rows):
            return pltpu.make_async_copy(
                self.hbm.at[pl.ds(pl.multiple_of(number * tile, tile), rows)],
                self.buffers_ref.at[buffer, pl.ds(0, rows)],
                self.arrived.at[buffer],
            )

        if whole:

            @pl.when(number < whole)
            def of_a_whole_tile():
                act(copy(tile))

        if rest:

            @pl.when(number == whole)
            def of_the_rest():
                act(copy(rest))
