"""Layout tables as tiles of a TPU's matrix unit.

Blocks below 128 do not fill a register's lanes, so a tile has `128 / block` blocks a side.  A tile
costs its full product however few of its blocks are stored: up to (128 / block)² times the stored
work for scattered blocks, no extra work if supports come in runs of 128 features.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Table = np.ndarray | jax.Array
"""A static layout's table, or an evolving one's, traced."""


class TileTables(NamedTuple):
    """The weight tiles of each line (a tile column for y = xW, a tile row for dx), int32.

    Attributes:
      count: [lines], number of tiles of the line; further entries are padding.
      index: [lines, entries], the tile of the gathered side that an entry reads.
      slot: [lines, entries, ratio, ratio], place in `values` of the block at (gathered side, line
        side) of a tile; -1 if it is not stored.
    """

    count: Table  # type: ignore[assignment]
    index: Table  # type: ignore[assignment]
    slot: Table


def tile_tables(index: Table, slot: Table, others: int, ratio: int) -> TileTables:
    """Return tables of tiles of `ratio` x `ratio` blocks.

    Args:
      index: int [lines, fan], `in_index` or `out_index` of LayoutTables.
      slot: int [lines, fan], `in_slot` or `out_slot`.
      others: number of blocks of the gathered side, which `index` points into.
      ratio: blocks along a tile's side.

    Returns:
      Numpy tables for numpy arguments, as wide as the longest line; else traced tables, as wide as
      any layout of this fan needs.
    """
    concrete = isinstance(index, np.ndarray) and isinstance(slot, np.ndarray)
    xp = np if concrete else jnp
    index, slot = xp.asarray(index, np.int32), xp.asarray(slot, np.int32)
    if ratio == 1:
        return _compact(xp, index, slot)
    # A tile has `ratio` lines; the last one is filled with lines that store nothing.
    extra = -len(slot) % ratio
    slot = xp.pad(slot, ((0, extra), (0, 0)), constant_values=-1)
    index = xp.pad(index, ((0, extra), (0, 0)))
    tiles = -(-others // ratio)
    grid = (_scatter_concrete if concrete else _scatter_traced)(index, slot, tiles * ratio)
    # [tile lines, tiles, gathered side, line side].
    grid = grid.reshape(-1, ratio, tiles, ratio).transpose(0, 2, 3, 1)
    used = (grid >= 0).any((2, 3))
    count = used.sum(axis=1)
    if concrete:
        # Used tiles first; stable, so that they ascend.
        order = np.argsort(~used, axis=1, kind="stable")[:, : max(1, count.max())]
        return _int32(np, count, order, np.take_along_axis(grid, order[..., None, None], axis=1))
    # Comparisons instead of a sort and a scatter, which TPUs run and compile slowly.
    # At most, each block of a tile's lines is in a tile of its own.
    entries = min(ratio * slot.shape[1], tiles)
    rank = jnp.where(used, jnp.cumsum(used, axis=1) - 1, entries)
    # rank counts the used tiles before a tile, so entry e takes the one tile of rank e.  Unused
    # tiles have the rank `entries`, which no entry has.
    chosen = rank[:, None] == jnp.arange(entries)[:, None]
    numbers = jnp.where(chosen, jnp.arange(tiles), 0).max(axis=2)
    stored = jnp.where(chosen[..., None, None], grid[:, None], -1).max(axis=2)
    return _int32(jnp, count, numbers, stored)


def padded(tables: TileTables, lines: int, entries: int) -> TileTables:
    """Pad tables to multiples of `lines` and `entries` with empty lines and entries."""
    extra = (-len(tables.count) % lines, -tables.index.shape[1] % entries)
    pad = lambda a, value, *widths: jnp.pad(a, [(0, w) for w in widths], constant_values=value)  # noqa: E731
    return TileTables(
        pad(tables.count, 0, extra[0]),
        pad(tables.index, 0, *extra),
        pad(tables.slot, -1, *extra, 0, 0),
    )


def chunked(tables: TileTables, lines: int, entries: int) -> TileTables:
    """Pad tables as `padded`, and count the stored blocks of each chunk of `entries` entries.

    Returns:
      Tables whose `count` is int32 [lines, chunks].  Chunks without stored blocks come last.
    """
    tables = padded(tables, lines, entries)
    stored = (tables.slot >= 0).reshape(len(tables.count), -1, entries * tables.slot.shape[2] ** 2)
    return tables._replace(count=stored.sum(2, dtype=jnp.int32))


def smem_bytes(tables: TileTables) -> int:
    """Return the bytes of scalar memory that the tables take."""
    return sum(4 * table.size for table in jax.tree.leaves(tables))


def _compact(xp, index, slot):
    """Return the tables of blocks that are tiles; stored blocks first in each line."""
    used = slot >= 0
    count = used.sum(axis=1)
    if xp is np:
        order = np.argsort(~used, axis=1, kind="stable")
        index, slot = (np.take_along_axis(a, order, axis=1) for a in (index, slot))
        return _int32(np, count, np.where(slot >= 0, index, 0), slot[..., None, None])
    # Comparisons in place of a sort, as above: stored block of rank e goes to entry e.
    rank = jnp.where(used, jnp.cumsum(used, axis=1) - 1, -1)
    chosen = rank[:, None] == jnp.arange(slot.shape[1])[:, None]
    index = jnp.where(chosen, index[:, None], 0).max(axis=2)
    slot = jnp.where(chosen, slot[:, None], -1).max(axis=2)
    return _int32(jnp, count, index, slot[..., None, None])


def _scatter_concrete(index, slot, others):
    """Scatter slots to a grid [lines, others]; -1 where no block is stored."""
    grid = np.full((len(slot), others), -1, np.int32)
    line, position = np.nonzero(slot >= 0)
    grid[line, index[line, position]] = slot[line, position]
    return grid


def _scatter_traced(index, slot, others):
    """The same as `_scatter_concrete` for traced tables."""
    # [lines, others, fan].  Padding matches a place too, and its slot -1 loses the maximum.
    matches = index[:, None] == jnp.arange(others)[:, None]
    return jnp.where(matches, slot[:, None], -1).max(axis=2)


def _int32(xp, *tables):
    return TileTables(*(xp.asarray(table, np.int32) for table in tables))
