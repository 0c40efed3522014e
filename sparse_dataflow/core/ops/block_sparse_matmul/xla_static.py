"""The block-sparse matmul in plain XLA, specialised to a layout known at trace time.

Output blocks with equal support form a group: one dense dot over static slices of x.  dx does the
same for input blocks.  This is the fastest form on a CPU when supports repeat.  Compile time grows
with the number of groups.

A device of the mesh axis "feature" has the same strip of every stored block: some rows of a weight
that reads the residual stream, some columns of one that writes to it.  Every pattern is shared
evenly so, and groups stay groups.  The kernels multiply square blocks, so a strip becomes a run of
squares, and the layout that of the squares.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_dataflow.core.layouts.layout import BlockLayout, LayoutTables
from sparse_dataflow.core.ops import derivatives
from sparse_dataflow.core.ops.dispatch import Shaped
from sparse_dataflow.core.ops.matrix_product import copies, dot, transposed
from sparse_dataflow.files.errors import UserError


def block_sparse_matmul(x: jax.Array, values: jax.Array, layout: BlockLayout) -> jax.Array:
    """Compute `x @ W` for x [tokens, in_features], values [nnz, block, block], in x's dtype."""
    return _matmul(layout, x, values)


def block_sparse_matmul_refusal(x: Shaped, values: Shaped, layout: BlockLayout | None) -> str:
    """Return why a layout cannot be specialised; empty if it can."""
    return "" if layout else "it needs concrete numpy tables, not traced ones."


def _value(layout, x, values):
    return _product(x, values, layout, transposed=False)


def _product(x, values, layout, transposed):
    """Compute `x @ W`, or `x @ Wᵀ`, group by group."""
    pieces = []
    for support, lines in (row_groups if transposed else column_groups)(layout):
        if support:
            rows, cols = (lines, support) if transposed else (support, lines)
            weight = group_weight(values, layout, rows, cols)
            x_of_group = take(x, support, layout.block)
            y = dot(x_of_group, weight, 1, 1 if transposed else 0).astype(x.dtype)
        else:
            # A block without any stored block still has its columns in the result.
            y = jnp.zeros((x.shape[0], len(lines) * layout.block), x.dtype)
        pieces.append((lines, y))
    return assemble(pieces, layout.block)


def _backward(layout, saved, dy):
    x, values = saved
    # Else XLA makes the transposed copy of x in the forward pass already, and keeps it.
    x, dy = derivatives.again(x, dy)
    dx = _product(dy, values, layout, transposed=True)
    gradient = weight_gradient(x, layout.block)
    groups = [
        (rows, cols, gradient(rows, take(dy, cols, layout.block)))
        for rows, cols in column_groups(layout)
        if rows
    ]
    return dx, stored_gradient(groups, layout).astype(values.dtype)


_matmul = derivatives.bilinear(_value, _backward)


@functools.lru_cache(maxsize=4096)
def column_groups(layout: BlockLayout) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return [(input blocks, output blocks that read exactly these)]: one dot each."""
    return _groups(layout.mask.T)


@functools.lru_cache(maxsize=4096)
def row_groups(layout: BlockLayout) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return [(output blocks, input blocks that feed exactly these)]: one dot each."""
    return _groups(layout.mask)


def _groups(lines):
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, line in enumerate(lines):
        # Groups come in the order of their first members, which ascend.
        groups.setdefault(tuple(np.flatnonzero(line).tolist()), []).append(number)
    return [(support, tuple(members)) for support, members in groups.items()]


def group_weight(
    values: jax.Array, layout: BlockLayout, rows: tuple[int, ...], cols: tuple[int, ...]
) -> jax.Array:
    """Return a group's dense weight [len(rows) * block, len(cols) * block]."""
    # [rows, cols, block, block] -> [rows, block, cols, block].
    stored = values[layout.slots[np.ix_(rows, cols)]]
    return stored.swapaxes(1, 2).reshape(len(rows) * layout.block, len(cols) * layout.block)


def stored_gradient(
    groups: list[tuple[tuple[int, ...], tuple[int, ...], jax.Array]], layout: BlockLayout
) -> jax.Array:
    """Return the gradient [nnz, block, block] from each group's (rows, cols, dense gradient)."""
    stored, slots = [], []
    for rows, cols, dw in groups:
        grid = dw.reshape(len(rows), layout.block, len(cols), layout.block)
        # [rows, block, cols, block] -> [rows, cols, block, block], as blocks are stored.
        stored.append(grid.swapaxes(1, 2).reshape(-1, layout.block, layout.block))
        slots.append(layout.slots[np.ix_(rows, cols)].reshape(-1))
    # The groups store every slot once, so sorting their slots gives the inverse permutation, at
    # trace time: one gather with constant indices and no scatter.
    return jnp.concatenate(stored)[np.argsort(np.concatenate(slots))]


def take(x: jax.Array, blocks: tuple[int, ...], block: int) -> jax.Array:
    """Gather these blocks' columns of x [rows, features]: one slice where they lie at a stride."""
    if stride := _stride(blocks, x.shape[1] // block):
        count, start, stop = stride
        # [rows, count, features of a part]: one slice has the run of every part.
        parts = x.reshape(x.shape[0], count, x.shape[1] // count)[
            :, :, start * block : stop * block
        ]
        return parts.reshape(x.shape[0], len(blocks) * block)
    slices = [lax.slice_in_dim(x, a * block, b * block, axis=1) for a, b in _runs(blocks)]
    return slices[0] if len(slices) == 1 else jnp.concatenate(slices, axis=1)


def weight_gradient(x: jax.Array, block: int) -> Callable[[tuple[int, ...], jax.Array], jax.Array]:
    """Return (input blocks, dy of a group) -> the gradient of the group's dense weight.

    Args:
      x: the inputs of all groups, [rows, features].
      block: side of a block.
    """
    if not copies(x.dtype):
        return lambda blocks, dy: dot(take(x, blocks, block), dy, 0, 0)
    by_feature = transposed(x)  # Once, as the columns of each group lie apart.

    def gradient(blocks, dy):
        lines = [lax.slice_in_dim(by_feature, a * block, b * block) for a, b in _runs(blocks)]
        return dot(lines[0] if len(lines) == 1 else jnp.concatenate(lines), dy, 1, 0)

    return gradient


def assemble(pieces: list[tuple[tuple[int, ...], jax.Array]], block: int) -> jax.Array:
    """Concatenate pieces (block numbers, their columns) in the order of the block numbers."""
    total = sum(len(blocks) for blocks, _ in pieces)
    strides = [_stride(blocks, total) for blocks, _ in pieces]
    if len({stride and stride[0] for stride in strides}) == 1 and strides[0]:
        count = strides[0][0]
        ordered = sorted(pieces, key=lambda piece: piece[0])
        # All pieces have runs at one stride.  As [rows, count, run] they are neighbours along the
        # last axis, so one concatenation orders all runs.
        parts = [y.reshape(y.shape[0], count, y.shape[1] // count) for _, y in ordered]
        return jnp.concatenate(parts, axis=2).reshape(parts[0].shape[0], total * block)
    runs = []
    for blocks, columns in pieces:
        offset = 0
        # Else each run of consecutive blocks is cut out, and all are joined in the order of their
        # blocks.
        for start, stop in _runs(blocks):
            width = (stop - start) * block
            runs.append((start, lax.slice_in_dim(columns, offset, offset + width, axis=1)))
            offset += width
    return jnp.concatenate([columns for _, columns in sorted(runs, key=lambda r: r[0])], axis=1)


def _runs(blocks):
    """Return the maximal runs [start, stop) of consecutive block numbers."""
    breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
    return [(run[0], run[-1] + 1) for run in np.split(np.asarray(blocks), breaks)]


def _stride(blocks, total):
    """Return (count, start, stop) of equal parts of `total` blocks, of which each has the run
    [start, stop), if `blocks` are these runs; else None."""
    runs = _runs(blocks)
    start, stop = map(int, runs[0])
    step = total // len(runs)
    expected = [(start + k * step, stop + k * step) for k in range(len(runs))]
    return (len(runs), start, stop) if total % len(runs) == 0 and runs == expected else None


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
    # A strip of 32 x 128 becomes four output blocks of 32 with the same inputs.  Slots ascend by
    # output block first, so the squares of a strip are not neighbours.  Slot (line, position)
    # becomes (4 line + k, position) for k from 0 to 3.  Slots are only such a grid if every line
    # has fan_in.
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
