"""Strips of stored blocks as smaller square blocks.

A device of the mesh axis "feature" has the same strip of every stored block: some rows of a weight
that reads the residual stream, some columns of one that writes to it.  Every pattern is shared
evenly so, and groups stay groups.  The kernels multiply square blocks, so a strip becomes a run of
squares, and the layout that of the squares.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.layouts.layout import LayoutTables
from sparse_dataflow.files.errors import UserError


def in_squares(values: jax.Array, tables: LayoutTables) -> tuple[jax.Array, LayoutTables]:
    """Returns strips as square blocks, and the tables of these.

    Args:
      values: float [nnz, rows, columns], one of which is a multiple of the other; in the order of
        `BlockLayout`, like the result.
      tables: of the layout of the strips, concrete or traced.

    Returns:
      (float [nnz * squares, side, side], tables), with side = min(rows, columns).

    Raises:
      UserError: rows are fewer than columns, and output blocks read unequally many input blocks.
    """
    _, rows, columns = values.shape
    side, squares = min(rows, columns), max(rows, columns) // min(rows, columns)
    if squares == 1:
        return values, tables
    if rows > columns:  # The squares of a block follow one another.
        in_index, in_slot = (_divided(table, squares) for table in tables[:2])
        out_index, out_slot = (table.repeat(squares, -2) for table in tables[2:4])
        offsets = np.tile(np.arange(squares, dtype=np.int32), len(tables.out_index))[:, None]
        out_slot = _where(out_slot >= 0, out_slot * squares + offsets, out_slot)
        groups = _with_runs(tables.groups, in_run=squares)
        squared = LayoutTables(in_index, in_slot, out_index, out_slot, groups)
        return values.reshape(-1, side, side), squared
    lines, fan_in = tables.in_index.shape
    if lines * fan_in != len(values):
        raise UserError(
            "The axis feature cuts layouts of which every output block reads equally many input "
            "blocks; legal with this one: a mesh without feature."
        )
    in_index = tables.in_index.repeat(squares, 0)
    in_slot = np.arange(lines * squares * fan_in, dtype=np.int32).reshape(-1, fan_in)
    out_index = _divided(tables.out_index, squares)
    line, position = tables.out_slot // fan_in, tables.out_slot % fan_in
    out_slot = _divided(line, squares) * fan_in + position.repeat(squares, -1)
    out_slot = _where(tables.out_slot.repeat(squares, -1) >= 0, out_slot, -1)
    groups = _with_runs(tables.groups, out_run=squares)
    by_line = values.reshape(lines, fan_in, side, squares, side).transpose(0, 3, 1, 2, 4)
    squared = LayoutTables(in_index, in_slot, out_index, out_slot, groups)
    return by_line.reshape(-1, side, side), squared


def _divided(table, squares):
    """Returns the indices of the squares of each block of a table [lines, fan]; -1 stays -1."""
    index = table[..., None] * squares + np.arange(squares, dtype=np.int32)
    index = _where(table[..., None] >= 0, index, -1)
    return index.reshape(len(table), -1)


def _where(condition, x, y):
    """Returns `where` of numpy for numpy arrays, which concrete tables stay."""
    library = np if isinstance(condition, np.ndarray) else jnp
    return library.where(condition, x, y).astype(np.int32)


def _with_runs(groups, in_run=1, out_run=1):
    if groups is None:
        return None
    runs = {"in_run": groups.in_run * in_run, "out_run": groups.out_run * out_run}
    return dataclasses.replace(groups, **runs)
