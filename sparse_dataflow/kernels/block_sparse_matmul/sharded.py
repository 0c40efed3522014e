"""The block-sparse matmul over a mesh: weights sharded over a tensor axis, tokens over data axes.

Each shard of a layout is a smaller layout with its own index tables, so every device runs the op on
its local blocks.  Weights are never communicated.  Column-parallel sums dx over the tensor axis,
row-parallel sums y (arXiv 1909.08053, section 3); both sum dW over the data axes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from sparse_dataflow.errors import UserError
from sparse_dataflow.kernels.block_sparse_matmul.api import block_sparse_matmul
from sparse_dataflow.sparsity.layout import BlockLayout, LayoutTables, widened


@dataclasses.dataclass(frozen=True)
class ShardedLayout:
    """A layout split into shards that store equally many blocks.

    Attributes:
      shards: the layout of each shard.
      order: int32 [nnz], permutation from the whole layout's order to the shards' order.
        `values[order]`, split evenly along its first axis, gives the shards' values.
      tables: index tables of the shards, stacked: int32 [shards, lines, fan].
    """

    shards: tuple[BlockLayout, ...]
    order: np.ndarray
    tables: LayoutTables


def cut_columns(layout: BlockLayout, shards: int, fan: int | None = None) -> ShardedLayout:
    """Split a layout by output blocks, for `column_parallel`; `order` is the identity.

    Args:
      layout: layout of the whole weight.
      shards: number of shards.
      fan: width of the tables by input block; a fixed width lets an evolving layout keep its
        program.  None for the longest line of any shard.

    Raises:
      UserError: if the shards would differ in shape or in stored blocks, or a line exceeds `fan`.
    """
    return _cut(layout, shards, fan, layout.cols, "output")


def cut_rows(layout: BlockLayout, shards: int, fan: int | None = None) -> ShardedLayout:
    """Split a layout by input blocks, for `row_parallel`; arguments as in `cut_columns`.

    `fan` is the width of the tables by output block.
    """
    return _cut(layout, shards, fan, layout.rows, "input")


def _cut(layout, shards, fan, side, name):
    by_column = name == "output"
    total = layout.out_blocks if by_column else layout.in_blocks
    if shards < 1 or total % shards:
        legal = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
        raise UserError(
            f"{total} {name} blocks cannot be split into {shards} shards; legal: {legal}."
        )
    local_blocks = total // shards
    stored = np.bincount(side // local_blocks, minlength=shards)
    if np.ptp(stored):
        raise UserError(
            f"Shards would store from {min(stored)} to {max(stored)} blocks; "
            f"legal: layouts that store equally many blocks for each {name} block."
        )
    members = [np.flatnonzero(side // local_blocks == shard) for shard in range(shards)]
    grid = (layout.in_blocks, local_blocks) if by_column else (local_blocks, layout.out_blocks)
    shard_layouts = []
    for shard, at in enumerate(members):
        rows, cols = layout.rows[at], layout.cols[at]
        if by_column:
            cols = cols - shard * local_blocks
        else:
            rows = rows - shard * local_blocks
        shard_layouts.append(BlockLayout(layout.block, *grid, rows, cols))
    order = np.concatenate(members).astype(np.int32)
    return ShardedLayout(tuple(shard_layouts), order, _stacked(shard_layouts, fan, by_column))


def _stacked(shard_layouts, fan, by_column):
    """Stack the shards' tables, padded to one width; `fan` sets the unsharded side's width."""
    each = [shard_layout.tables() for shard_layout in shard_layouts]
    fan_in, _, fan_out, _ = (max(table.shape[1] for table in tables) for tables in zip(*each))
    if fan is not None and by_column:
        fan_out = fan
    elif fan is not None:
        fan_in = fan
    each = [widened(tables, fan_in, fan_out) for tables in each]
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
    """Compute `x @ W`; each device of the tensor axis computes its columns of y.

    Args:
      x: float [tokens, ..., in_features], tokens sharded over `data_axes`.
      values: [nnz, block, block] in the order of `ShardedLayout`, sharded over `axis`.
      tables: `cut_columns(...).tables`, concrete or traced, sharded over `axis`.
      mesh: the devices.
      axis: the tensor axis.
      data_axes: axes that tokens are sharded over.
      implementation: as in `block_sparse_matmul`; it must accept traced tables.

    Returns:
      [tokens, ..., out_features] in x's dtype; tokens over `data_axes`, columns over `axis`.

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
    """Compute `x @ W`; each device of the tensor axis reads its columns of x, then y is summed.

    Args:
      x: float [tokens, ..., in_features]; tokens sharded over `data_axes`, columns over `axis`, as
        `column_parallel` returns it.
      values: [nnz, block, block] in the order of `cut_rows`, sharded over `axis`.
      tables: `cut_rows(...).tables`, concrete or traced, sharded over `axis`.
      mesh: the devices.
      axis: the tensor axis.
      data_axes: axes that tokens are sharded over.
      implementation: as in `column_parallel`.

    Returns:
      [tokens, ..., out_features] in x's dtype; sharded over `data_axes`, replicated over `axis`.

    Raises:
      UserError: if tables, tokens or axes do not fit the mesh.
    """
    check_mesh(x, tables, mesh, axis, data_axes)
    return _parallel(_Product(mesh, axis, data_axes, implementation, False), x, values, tables)


def check_mesh(
    x: jax.Array, tables: LayoutTables, mesh: Mesh, axis: str, data_axes: tuple[str, ...]
) -> None:
    """Raise UserError if stacked tables, tokens or axes do not fit the mesh."""
    unknown = {axis, *data_axes} - set(mesh.axis_names)
    if unknown or axis in data_axes:
        raise UserError(
            f"axis {axis!r} and data axes {data_axes} do not fit the mesh; "
            f"legal: distinct names of {', '.join(mesh.axis_names)}."
        )
    shards = tables.in_slot.shape[0]
    if tables.in_slot.ndim != 3 or shards != mesh.shape[axis]:
        raise UserError(
            f"tables have shape {tables.in_slot.shape}; "
            f"legal: [{mesh.shape[axis]}, lines, fan], one shard per device of {axis!r}."
        )
    ways = math.prod(mesh.shape[name] for name in data_axes)
    if x.ndim < 2 or x.shape[0] % ways:
        raise UserError(f"x has shape {x.shape}; legal: [a multiple of {ways}, ..., in_features].")


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """How an op is partitioned over a mesh.

    Attributes:
      mesh: the devices.
      axis: the tensor axis.
      data_axes: axes that tokens are sharded over.
      implementation: the implementation that each device runs, or None to choose.
    """

    mesh: Mesh
    axis: str
    data_axes: tuple[str, ...]
    implementation: str | None

    def shard_map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """Map `function` over the devices' local shards; it must write its own collectives."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def local_tables(self, stacked: Any) -> Any:
        """Return a device's tables, given its local slice of stacked tables."""
        return jax.tree.map(lambda table: table[0], stacked)


@dataclasses.dataclass(frozen=True)
class _Product(TensorParallel):
    """How one product is partitioned: by output features (`by_column`) or by input features."""

    by_column: bool

    def partition_specs(self, x):
        """Return the specs of (x, values, tables, y)."""
        tokens = (self.data_axes or None, *[None] * (x.ndim - 2))
        split, whole = PartitionSpec(*tokens, self.axis), PartitionSpec(*tokens, None)
        weight = PartitionSpec(self.axis)
        sides = (whole, split) if self.by_column else (split, whole)
        return sides[0], weight, weight, sides[1]

    def run(self, x, values, tables):
        """Compute one device's local product."""
        return block_sparse_matmul(x, values, self.local_tables(tables), self.implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _parallel(placement, x, values, tables):
    *operands, result = placement.partition_specs(x)

    def local(x, values, tables):
        y = placement.run(x, values, tables)
        return y if placement.by_column else jax.lax.psum(y, placement.axis)

    return placement.shard_map(local, tuple(operands), result)(x, values, tables)


def _forward(placement, x, values, tables):
    return _parallel(placement, x, values, tables), (x, values, tables)


def _backward(placement, saved, dy):
    *operands, result = placement.partition_specs(saved[0])

    def local(x, values, tables, dy):
        _, pullback = jax.vjp(lambda x, values: placement.run(x, values, tables), x, values)
        dx, dvalues = pullback(dy)
        if placement.by_column:
            dx = jax.lax.psum(dx, placement.axis)
        if placement.data_axes:
            dvalues = jax.lax.psum(dvalues, placement.data_axes)
        return dx, dvalues

    gradients = placement.shard_map(local, (*operands, result), tuple(operands[:2]))(*saved, dy)
    return *gradients, None


_parallel.defvjp(_forward, _backward)
