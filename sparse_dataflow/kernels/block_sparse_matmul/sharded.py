"""The block-sparse matmul over a mesh: weights cut over a tensor axis, tokens over data axes.

A cut layout is one smaller layout a shard, each with index tables of its own, so that every device
runs the op on what it holds.  No weight ever travels: column-parallel, the shards' dx are summed;
row-parallel, their y (arXiv 1909.08053, section 3); dW over the data axes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels.block_sparse_matmul.api import block_sparse_matmul
from sparse_dataflow.sparsity.layout import BlockLayout, LayoutTables, pad_tables


@dataclasses.dataclass(frozen=True)
class ShardedLayout:
    """A layout cut into shards that store equally many blocks.

    Attributes:
      shards: the layout of each shard.
      order: int32 [nnz], the whole layout's blocks in the shards' order: `values[order]`, cut into
        equal parts along its first axis, are the shards' values.
      tables: index tables of each shard, stacked: int32 [shards, lines, fan].
    """

    shards: tuple[BlockLayout, ...]
    order: np.ndarray
    tables: LayoutTables


def cut_columns(layout: BlockLayout, shards: int, fan: int | None = None) -> ShardedLayout:
    """The layout cut by output blocks, for `column_parallel`; `order` changes nothing.

    Args:
      layout: the whole weight's.
      shards: into how many.
      fan: width of the tables by input block, so that layouts which evolve share one program;
        None for the longest line of any shard.

    Raises:
      UserError: if the shards would differ in shape or in stored blocks, or a line exceeds `fan`.
    """
    return _cut(layout, shards, fan, layout.cols, "output")


def cut_rows(layout: BlockLayout, shards: int, fan: int | None = None) -> ShardedLayout:
    """The layout cut by input blocks, for `row_parallel`; arguments as in `cut_columns`.

    `fan` is the width of the tables by output block.
    """
    return _cut(layout, shards, fan, layout.rows, "input")


def _cut(layout, shards, fan, side, name):
    by_column = name == "output"
    total = layout.out_blocks if by_column else layout.in_blocks
    if shards < 1 or total % shards:
        legal = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
        raise UserError(
            f"{total} {name} blocks cannot be cut into {shards} shards; legal: {legal}."
        )
    own = total // shards
    stored = np.bincount(side // own, minlength=shards)
    if np.ptp(stored):
        raise UserError(
            f"Shards would store from {min(stored)} to {max(stored)} blocks; "
            f"legal: layouts whose {name} blocks store equally many each, as balanced ones do."
        )
    members = [np.flatnonzero(side // own == shard) for shard in range(shards)]
    grid = (layout.in_blocks, own) if by_column else (own, layout.out_blocks)
    parts = []
    for shard, at in enumerate(members):
        rows, cols = layout.rows[at], layout.cols[at]
        if by_column:
            cols = cols - shard * own
        else:
            rows = rows - shard * own
        parts.append(BlockLayout(layout.block, *grid, rows, cols))
    order = np.concatenate(members).astype(np.int32)
    return ShardedLayout(tuple(parts), order, _stacked(parts, fan, by_column))


def _stacked(parts, fan, by_column):
    """The parts' tables padded to one width; that of the tables across the cut is `fan`."""
    each = [part.tables() for part in parts]
    fan_in, _, fan_out, _ = (max(table.shape[1] for table in tables) for tables in zip(*each))
    if fan is not None and by_column:
        fan_out = fan
    elif fan is not None:
        fan_in = fan
    each = [pad_tables(tables, fan_in, fan_out) for tables in each]
    return LayoutTables(*map(np.stack, zip(*each)))


def column_parallel(
    x: jax.Array,
    values: jax.Array,
    tables: LayoutTables,
    mesh: Mesh,
    axis: str,
    *,
    data_axes: tuple[str, ...] = (),
    implementation: str | None = None,
) -> jax.Array:
    """`x @ W`, each device of the tensor axis making its own columns of y.

    Args:
      x: float [tokens, ..., in_features], tokens sharded over `data_axes`.
      values: [nnz, block, block] in the order of `ShardedLayout`, sharded over `axis`.
      tables: `cut_columns(...).tables`, concrete or traced, sharded over `axis`.
      mesh: the devices.
      axis: the tensor axis.
      data_axes: axes that tokens are sharded over.
      implementation: as in `block_sparse_matmul`, of those that take traced tables.

    Returns:
      [tokens, ..., out_features] in x's dtype, sharded over `data_axes` and, by column, `axis`.

    Raises:
      UserError: if tables, tokens or axes do not fit the mesh.
    """
    check_mesh(x, tables, mesh, axis, data_axes)
    return _parallel(_Product(mesh, axis, data_axes, implementation, True), x, values, tables)


def row_parallel(
    x: jax.Array,
    values: jax.Array,
    tables: LayoutTables,
    mesh: Mesh,
    axis: str,
    *,
    data_axes: tuple[str, ...] = (),
    implementation: str | None = None,
) -> jax.Array:
    """`x @ W`, each device of the tensor axis reading its own columns of x; the y are summed.

    Args:
      x: float [tokens, ..., in_features], sharded over `data_axes` and, by column, `axis`: what
        `column_parallel` gives.
      values: as there, of `cut_rows`.
      tables: `cut_rows(...).tables`.
      mesh: the devices.
      axis: the tensor axis.
      data_axes: axes that tokens are sharded over.
      implementation: as in `column_parallel`.

    Returns:
      [tokens, ..., out_features] in x's dtype, sharded over `data_axes`, equal along `axis`.

    Raises:
      UserError: if tables, tokens or axes do not fit the mesh.
    """
    check_mesh(x, tables, mesh, axis, data_axes)
    return _parallel(_Product(mesh, axis, data_axes, implementation, False), x, values, tables)


def check_mesh(
    x: jax.Array, tables: LayoutTables, mesh: Mesh, axis: str, data_axes: tuple[str, ...]
) -> None:
    """Raises UserError where stacked tables, tokens or axes do not fit the mesh."""
    unknown = {axis, *data_axes} - set(mesh.axis_names)
    if unknown or axis in data_axes:
        raise UserError(
            f"axis {axis!r} and data axes {data_axes} do not fit the mesh; "
            f"legal: different ones of {', '.join(mesh.axis_names)}."
        )
    shards = tables.in_slot.shape[0]
    if tables.in_slot.ndim != 3 or shards != mesh.shape[axis]:
        raise UserError(
            f"tables have shape {tables.in_slot.shape}; "
            f"legal: [{mesh.shape[axis]}, lines, fan], a shard for each device of {axis!r}."
        )
    ways = math.prod(mesh.shape[name] for name in data_axes)
    if x.ndim < 2 or x.shape[0] % ways:
        raise UserError(f"x has shape {x.shape}; legal: [a multiple of {ways}, ..., in_features].")


@dataclasses.dataclass(frozen=True)
class Cut:
    """How an op is laid out on a mesh.

    Attributes:
      mesh: the devices.
      axis: the tensor axis.
      data_axes: axes that tokens are sharded over.
      implementation: as in the op.
    """

    mesh: Mesh
    axis: str
    data_axes: tuple[str, ...]
    implementation: str | None

    def over_mesh(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """`function` on what each device holds; what is summed over which axis it writes out."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def own(self, stacked: Any) -> Any:
        """A device's own of tables that are cut over the tensor axis."""
        return jax.tree.map(lambda table: table[0], stacked)


@dataclasses.dataclass(frozen=True)
class _Product(Cut):
    """How one product is; by output (column) or input features."""

    by_column: bool

    def specs(self, x):
        """Of (x, values, tables, y)."""
        tokens = (self.data_axes or None, *[None] * (x.ndim - 2))
        split, whole = PartitionSpec(*tokens, self.axis), PartitionSpec(*tokens, None)
        held = PartitionSpec(self.axis)
        sides = (whole, split) if self.by_column else (split, whole)
        return sides[0], held, held, sides[1]

    def run(self, x, values, tables):
        """A device's own part."""
        return block_sparse_matmul(x, values, self.own(tables), self.implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _parallel(cut, x, values, tables):
    *operands, result = cut.specs(x)

    def local(x, values, tables):
        y = cut.run(x, values, tables)
        return y if cut.by_column else jax.lax.psum(y, cut.axis)

    return cut.over_mesh(local, tuple(operands), result)(x, values, tables)


def _forward(cut, x, values, tables):
    return _parallel(cut, x, values, tables), (x, values, tables)


def _backward(cut, saved, dy):
    *operands, result = cut.specs(saved[0])

    def local(x, values, tables, dy):
        _, pullback = jax.vjp(lambda x, values: cut.run(x, values, tables), x, values)
        dx, dvalues = pullback(dy)
        if cut.by_column:
            dx = jax.lax.psum(dx, cut.axis)
        if cut.data_axes:
            dvalues = jax.lax.psum(dvalues, cut.data_axes)
        return dx, dvalues

    gradients = cut.over_mesh(local, (*operands, result), tuple(operands[:2]))(*saved, dy)
    return *gradients, None


_parallel.defvjp(_forward, _backward)
