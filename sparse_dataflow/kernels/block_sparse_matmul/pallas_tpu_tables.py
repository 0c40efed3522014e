"""Layout tables in tiles that a TPU's matrix unit takes.

Blocks below 128 do not fill a register's lanes, so `128 / block` of them a side make one tile.  A
tile costs its full product however few of its blocks are stored: up to (128 / block)² times the
stored work where blocks lie apart, nothing extra where supports come in runs of 128 features.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class TileTables(NamedTuple):
    """The weight tiles of each line (a tile column for y = xW, a tile row for dx), int32.

    Attributes:
      count: [lines], how many tiles the line has; further entries are padding.
      index: [lines, entries], the tile of the other side that an entry reads.
      slot: [lines, entries, ratio, ratio], place in `values` of the block at (other side, line's
        side) of a tile; -1 where none is stored.
    """

    count: Any
    index: Any
    slot: Any


def tile_tables(index: Any, slot: Any, others: int, ratio: int) -> TileTables:
    """Tables of tiles of `ratio` x `ratio` blocks.

    Args:
      index: int [lines, fan], `in_index` or `out_index` of LayoutTables.
      slot: int [lines, fan], `in_slot` or `out_slot`.
      others: blocks of the side that `index` counts.
      ratio: blocks along a tile.

    Numpy tables give numpy tables as wide as the longest line; traced ones are as wide as any
    layout of this fan could need.
    """
    concrete = isinstance(index, np.ndarray) and isinstance(slot, np.ndarray)
    xp: Any = np if concrete else jnp
    extra = -len(slot) % ratio
    slot = xp.pad(xp.asarray(slot), ((0, extra), (0, 0)), constant_values=-1)
    index = xp.pad(xp.asarray(index), ((0, extra), (0, 0)))
    fan = slot.shape[1]
    slot, index = slot.reshape(-1, ratio * fan), index.reshape(-1, ratio * fan)
    places = np.broadcast_to(np.arange(slot.shape[1], dtype=np.int32), slot.shape)
    if ratio == 1:
        count = xp.max(xp.where(slot >= 0, places, -1), axis=1) + 1
        return _int32(xp, count, xp.where(slot >= 0, index, 0), slot[..., None, None])
    line = np.broadcast_to(np.arange(len(slot))[:, None], slot.shape)
    tiles = -(-others // ratio)
    tile = xp.where(slot >= 0, index // ratio, tiles)
    # Padding falls into a column beyond the last tile, and is cut off.
    used = _filled(xp, (len(slot), tiles + 1), 0, (line, tile), 1)[:, :tiles]
    count = used.sum(axis=1)
    entries = max(1, int(count.max())) if concrete else min(slot.shape[1], tiles)
    rank = xp.where(used, xp.cumsum(used, axis=1) - 1, entries)
    rank = xp.pad(rank, ((0, 0), (0, 1)), constant_values=entries)
    entry = xp.take_along_axis(rank, tile, axis=1)
    order = _filled(xp, (len(slot), entries + 1), 0, (line, entry), tile)[:, :entries]
    at = (line, entry, index % ratio, places // fan)
    stored = _filled(xp, (len(slot), entries + 1, ratio, ratio), -1, at, slot)[:, :entries]
    return _int32(xp, count, order, stored)


def padded(tables: TileTables, lines: int, entries: int) -> TileTables:
    """Tables with multiples of so many lines and entries; what is added stores nothing."""
    extra = (-len(tables.count) % lines, -tables.index.shape[1] % entries)
    pad = lambda a, value, *widths: jnp.pad(a, [(0, w) for w in widths], constant_values=value)  # noqa: E731
    return TileTables(
        pad(tables.count, 0, extra[0]),
        pad(tables.index, 0, *extra),
        pad(tables.slot, -1, *extra, 0, 0),
    )


def smem_bytes(tables: TileTables) -> int:
    """Scalar memory that the tables take."""
    return sum(4 * table.size for table in jax.tree.leaves(tables))


def _filled(xp, shape, value, at, items):
    """An int32 array of `value` with `items` at the index arrays `at`."""
    if xp is jnp:
        return jnp.full(shape, value, jnp.int32).at[at].set(items)
    array = np.full(shape, value, np.int32)
    array[at] = items
    return array


def _int32(xp, *tables):
    return TileTables(*(xp.asarray(table, np.int32) for table in tables))
