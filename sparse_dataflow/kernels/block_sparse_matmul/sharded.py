"""Layouts split into shards for tensor parallelism: one smaller layout and its tables per shard.

Every device then runs the op on its local blocks.  Weights are never communicated: column-parallel
sums dx over the tensor axis, row-parallel sums y (arXiv 1909.08053, section 3).
"""

import dataclasses

import numpy as np

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.sparsity.layout import BlockLayout, LayoutTables, pad_tables, stack_tables


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
    """Split a layout by output blocks (column-parallel); `order` is the identity.

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
    """Split a layout by input blocks (row-parallel); arguments as in `cut_columns`.

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
        max_fan_out = None if by_column else layout.max_fan_out
        shard_layouts.append(BlockLayout(layout.block, *grid, rows, cols, max_fan_out))
    order = np.concatenate(members).astype(np.int32)
    return ShardedLayout(tuple(shard_layouts), order, _stacked(shard_layouts, fan, by_column))


def _stacked(shard_layouts, fan, by_column):
    """Stack the shards' tables, padded to one width; `fan` sets the unsharded side's width."""
    each = [shard_layout.tables() for shard_layout in shard_layouts]
    fan_in = max(tables.in_index.shape[1] for tables in each)
    fan_out = max(tables.out_index.shape[1] for tables in each)
    if fan is not None and by_column:
        fan_out = fan
    elif fan is not None:
        fan_in = fan
    each = [pad_tables(tables, fan_in, fan_out) for tables in each]
    return stack_tables(each)
