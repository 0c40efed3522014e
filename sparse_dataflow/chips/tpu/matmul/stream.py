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

from sparse_dataflow.chips.tpu.matmul.tables import TileTables, chunked
from sparse_dataflow.chips.tpu.matmul.tuning import StreamTiles


def pop_if(present: bool, refs: list[jax.Ref]) -> Any:
    """Pop the next of a kernel's refs if it is present, else return None."""
    return refs.pop(0) if present else None


def wait_for(count: int | jax.Array, blocks_ref: jax.Ref, semaphore: jax.Ref) -> None:
    """Wait for the copies of `count` blocks of a ref [blocks, ...], in powers of two."""
    # A wait needs a static size, and `count` is traced: 5 copies are waited for as 1 and 4.
    for bit in range(blocks_ref.shape[0].bit_length()):

        @pl.when((count >> bit) & 1 == 1)
        def wait(number=2**bit):
            blocks = blocks_ref.at[pl.ds(0, number)]
            pltpu.make_async_copy(blocks, blocks, semaphore).wait()


def dot(a: jax.Array, b: jax.Array, transposed: bool = False) -> jax.Array:
    """Multiply a by b, or by its transpose, in float32."""
    return lax.dot_general(
        a,
        b,
        (((1,), (1 if transposed else 0,)), ((), ())),
        # The matrix unit would round float32 to bfloat16.
        precision=lax.Precision.HIGHEST if b.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def parameters(vmem_bytes: int) -> pltpu.CompilerParams:
    """Return the compiler parameters of a kernel whose grid starts with the cores."""
    return pltpu.CompilerParams(
        # Only cores are independent: the other axes run in order, as copies that one step starts
        # are waited for in a later one.
        dimension_semantics=("parallel", "arbitrary", "arbitrary"),
        vmem_limit_bytes=vmem_bytes,
        disable_bounds_checks=True,
    )


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

    @property
    def blocks(self) -> int:
        """Blocks of a chunk."""
        return self.entries * self.ratio**2

    @property
    def slots(self) -> int:
        """Blocks of all chunks of all lines."""
        return self.lines * self.chunks * self.blocks

    def scratch(self, dtype) -> list:
        """Return the scratch shapes of `Stream`'s last three fields (two if ratio is 1)."""
        shapes = [
            pltpu.VMEM((self.ahead, self.blocks, self.block, self.block), dtype),
            pltpu.SemaphoreType.DMA((self.ahead,)),
        ]
        if self.ratio > 1:
            shapes.append(pltpu.VMEM((self.entries, self.tile, self.tile), dtype))
        return shapes


def stream_shape(
    values: jax.Array,
    tables: TileTables,
    tiles: StreamTiles,
    lines: int,
    transposed: bool,
) -> tuple[StreamShape, TileTables]:
    """Return a weight's stream shape, and its tables as `matmul.tables.chunked`."""
    tables = chunked(tables, lines, tiles.entries)
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
      stored_ref: stored blocks of each chunk, flat, in SMEM.
      index_ref: `TileTables.index`, flat, in SMEM.
      slot_ref: `TileTables.slot`, flat, in SMEM.
      values_hbm: [nnz, block, block].
      buffers_ref: the ring of chunks.
      arrived: semaphores of the ring.
      tiles_ref: tiles assembled from blocks smaller than a tile.
    """

    shape: StreamShape
    passes: int | jax.Array
    stored_ref: jax.Ref
    index_ref: jax.Ref
    slot_ref: jax.Ref
    values_hbm: jax.Ref
    buffers_ref: jax.Ref
    arrived: jax.Ref
    tiles_ref: Any = None

    def start(self):
        """Start the first copies; call once, before the first line."""
        # One buffer stays free: the dot of chunk 0 starts the copies into it.
        for number in range(self.shape.ahead - 1):
            self._start(number, 0, self.shape.blocks)

    def line(
        self,
        pass_number: jax.Array,
        line: jax.Array,
        x_ref: jax.Ref,
        rows: int,
        sum_ref: jax.Ref,
        finish: Callable,
    ) -> None:
        """Multiply x by one line of the weight.

        Args:
          pass_number: the pass, from 0; call every line of every pass, in order.
          x_ref: [tokens, features] in VMEM.
          rows: tokens of one dot.
          sum_ref: float32 [tokens, tile] scratch.
          finish: called with (slice of tokens, their float32 sums [rows, tile]).
        """
        shape = self.shape
        rounds = x_ref.shape[0] // rows
        # Blocks of the upcoming chunk whose copies each dot starts.
        share = pl.cdiv(shape.blocks, rounds)

        @pl.loop(0, shape.chunks)
        def _(chunk):
            # `place` counts in the tables, `number` over all passes as well: the ring goes on from
            # one token tile to the next.
            place = line * shape.chunks + chunk
            number = pass_number * shape.lines * shape.chunks + place
            # The ring has `ahead` buffers.  So chunk `upcoming` goes to the buffer that the round
            # before has read, that of chunk `number - 1`.
            upcoming = number + shape.ahead - 1
            stored = self.stored_ref[place]
            # Clamped at the very last place, where the chunk is the last of its line anyway.
            following = self.stored_ref[jnp.minimum(place + 1, shape.lines * shape.chunks - 1)]
            # Chunks without blocks end a line (`chunked`).  The first chunk is used even if it is
            # empty: else a line without blocks would never write its zeros.
            last = (chunk + 1 == shape.chunks) | (following == 0)
            used = (stored > 0) | (chunk == 0)
            buffer = lax.rem(number, shape.ahead)
            # Only stored blocks were copied, so the semaphore has as many signals.
            wait_for(stored, self.buffers_ref.at[buffer], self.arrived.at[buffer])

            def compute(masked):
                weight = self._weight(number, masked)

                @pl.loop(0, rounds)
                def _(r):
                    token_rows = pl.ds(pl.multiple_of(r * rows, rows), rows)
                    # In the block of the dot, so that the scalar unit starts copies during it.
                    self._start(upcoming, r * share, share)
                    total = self._dot(x_ref, token_rows, weight, number)
                    # A line of one chunk adds nothing up.
                    if shape.chunks == 1:
                        finish(token_rows, total)
                        return
                    total = total + jnp.where(chunk == 0, 0.0, sum_ref[token_rows, :])
                    sum_ref[token_rows, :] = total

                    @pl.when(last)
                    def _():
                        finish(token_rows, sum_ref[token_rows, :])

            # Full chunks, the usual case, need no selects.
            @pl.when(stored == shape.blocks)
            def _():
                compute(masked=False)

            @pl.when(used & (stored < shape.blocks))
            def _():
                compute(masked=True)

            # Without a dot, during which the next copies would start.
            @pl.when(~used)
            def _():
                self._start(upcoming, 0, shape.blocks)

    def _first_entry(self, number):
        """Return the first table entry of a chunk."""
        return lax.rem(number, self.shape.lines * self.shape.chunks) * self.shape.entries

    def _start(self, number, first, count):
        """Start the copies of `count` blocks of a chunk, from the block `first`."""
        shape = self.shape
        # Past the last pass nobody would wait for a copy.
        within = number < self.passes * shape.lines * shape.chunks
        slots = self._first_entry(number) * shape.ratio**2
        buffer = lax.rem(number, shape.ahead)
        for p in range(count):
            block = first + p
            # Past the last block, the slot of another chunk is read but not used.
            slot = self.slot_ref[jnp.minimum(slots + block, shape.slots - 1)]

            @pl.when(within & (block < shape.blocks) & (slot >= 0))
            def start(block=block, slot=slot):
                pltpu.make_async_copy(
                    self.values_hbm.at[slot],
                    self.buffers_ref.at[buffer, block],
                    self.arrived.at[buffer],
                ).start()

    def _dot(self, x_ref, rows, weight, number):
        tile = self.shape.tile
        first = self._first_entry(number)
        # [rows, entries * tile]: the tiles of x that a chunk reads side by side, for one long dot.
        gathered = [
            x_ref[rows, pl.ds(pl.multiple_of(self.index_ref[first + k] * tile, tile), tile)]
            for k in range(self.shape.entries)
        ]
        return dot(jnp.concatenate(gathered, axis=1), weight, self.shape.transposed)

    def _weight(self, number, masked):
        """Return a chunk's tiles, concatenated along the contraction.

        Args:
          number: of the chunk.
          masked: whether some blocks are not stored; they become zeros.
        """
        if self.shape.ratio == 1:
            tiles = [self._block(number, k, masked) for k in range(self.shape.entries)]
        else:
            tiles = self._assembled(number, masked)
        return jnp.concatenate(tiles, axis=1 if self.shape.transposed else 0)

    def _block(self, number, p, masked):
        stored = self.buffers_ref[lax.rem(number, self.shape.ahead), p]
        if not masked:
            return stored
        # Where nothing was copied, the buffer has blocks of an earlier chunk.
        slot = self.slot_ref[self._first_entry(number) * self.shape.ratio**2 + p]
        return jnp.where(slot >= 0, stored, 0)

    def _assembled(self, number, masked):
        ratio, block = self.shape.ratio, self.shape.block
        side = [pl.ds(number * block, block) for number in range(ratio)]

        @pl.loop(0, self.shape.entries)
        def _(k):
            for gathered_block in range(ratio):
                for line_block in range(ratio):
                    # Tables have blocks by (gathered side, line side).  The lines of dx are rows of
                    # the weight.
                    place = (
                        (line_block, gathered_block)
                        if self.shape.transposed
                        else (gathered_block, line_block)
                    )
                    p = (k * ratio + gathered_block) * ratio + line_block
                    stored = self._block(number, p, masked)
                    self.tiles_ref[k, side[place[0]], side[place[1]]] = stored

        return [self.tiles_ref[k] for k in range(self.shape.entries)]


class Rows(NamedTuple):
    """Whole operand rows of a token tile, copied from HBM into one or two buffers.

    Attributes:
      hbm: [tokens, features], tokens a multiple of a register's rows.
      buffers_ref: [1 or 2, tile tokens, features].
      arrived: one semaphore per buffer.
    """

    hbm: jax.Ref
    buffers_ref: jax.Ref
    arrived: jax.Ref

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
            # A single buffer is in use until now, so nothing hides this copy.
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

        # The rest of the buffer keeps older rows, whose results Pallas cuts off.
        if remainder:

            @pl.when(number == whole_tiles)
            def copy_remainder():
                act(copy(remainder))
