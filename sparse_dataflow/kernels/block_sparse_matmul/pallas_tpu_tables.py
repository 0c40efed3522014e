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
    index, slot = xp.asarray(index, np.int32), xp.asarray(slot, np.int32)
    if ratio == 1:
        places = xp.where(slot >= 0, xp.arange(slot.shape[1]), -1)
        stored = xp.where(slot >= 0, index, 0)
        return _int32(xp, xp.max(places, axis=1) + 1, stored, slot[..., None, None])
    extra = -len(slot) % ratio
    slot = xp.pad(slot, ((0, extra), (0, 0)), constant_values=-1)
    index = xp.pad(index, ((0, extra), (0, 0)))
    tiles = -(-others // ratio)
    grid = (_placed if concrete else _compared)(index, slot, tiles * ratio)
    grid = grid.reshape(-1, ratio, tiles, ratio).transpose(0, 2, 3, 1)
    used = (grid >= 0).any((2, 3))
    count = used.sum(axis=1)
    if concrete:
        order = np.argsort(~used, axis=1, kind="stable")[:, : max(1, count.max())]
        return _int32(np, count, order, np.take_along_axis(grid, order[..., None, None], axis=1))
    # Comparisons for what would be a sort and a scatter: a TPU is slow at both, its compiler too.
    entries = min(ratio * slot.shape[1], tiles)
    rank = jnp.where(used, jnp.cumsum(used, axis=1) - 1, entries)
    chosen = rank[:, None] == jnp.arange(entries)[:, None]
    numbers = jnp.where(chosen, jnp.arange(tiles), 0).max(axis=2)
    stored = jnp.where(chosen[..., None, None], grid[:, None], -1).max(axis=2)
    return _int32(jnp, count, numbers, stored)


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


def _placed(index, slot, others):
    """The slot of every pair of a line and one of `others`; -1 where nothing is stored."""
    grid = np.full((len(slot), others), -1, np.int32)
    line, position = np.nonzero(slot >= 0)
    grid[line, index[line, position]] = slot[line, position]
    return grid


def _compared(index, slot, others):
    """As `_placed`, of traced tables."""
    here = index[:, None] == jnp.arange(others)[:, None]
    return jnp.where(here, slot[:, None], -1).max(axis=2)


def _int32(xp, *tables):
    return TileTables(*(xp.asarray(table, np.int32) for table in tables))
