"""Layouts split into shards for tensor parallelism: one smaller layout and its tables per shard.

Every device then runs the op on its local blocks.  Weights are never communicated: column-parallel
sums dx over the tensor axis, row-parallel sums y (arXiv 1909.08053, section 3).
"""

import dataclasses

import numpy as np

from sparse_dataflow.core.layouts.layout import BlockLayout, LayoutTables, pad_tables, stack_tables
from sparse_dataflow.files.errors import UserError


@dataclasses.dataclass(frozen=True)
class ShardedLayout:
    """A layout split into shards that store equally many blocks.

    Attributes:
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
      fan: width of the tables by input block; a fixed width lets an evolving layout keep its
        program.  None for the longest line of any shard.

    Raises:
      UserError: if the shards would differ in shape or in stored blocks, or a line exceeds `fan`.
    """
    return _cut(layout, shards, fan, by_column=True)


def cut_rows(layout: BlockLayout, shards: int, fan: int | None = None) -> ShardedLayout:
    """Split a layout by input blocks (row-parallel); arguments as in `cut_columns`.

    `fan` is the width of the tables by output block.
    """
    return _cut(layout, shards, fan, by_column=False)


def _cut(layout, shards, fan, by_column):
    name = "output" if by_column else "input"
    side, total = (layout.cols, layout.out_blocks) if by_column else (layout.rows, layout.in_blocks)
    if shards < 1 or total % shards:
        legal = ", ".join(str(n) for n in range(1, total + 1) if total % n == 0)
        raise UserError(
            f"{total} {name} blocks cannot be split into {shards} shards; legal: {legal}."
        )
    local_blocks = total // shards
    # A shard has consecutive blocks of the sharded side, as a mesh cuts an array.
    shard_of_block, local = np.divmod(side, local_blocks)
    stored = np.bincount(shard_of_block, minlength=shards)
    # Arrays are cut into equal parts, and one program runs on all devices.
    if np.ptp(stored):
        raise UserError(
            f"Shards would store from {min(stored)} to {max(stored)} blocks; "
            f"legal: layouts that store equally many blocks for each {name} block."
        )
    rows, cols = (layout.rows, local) if by_column else (local, layout.cols)
    grid = (layout.in_blocks, local_blocks) if by_column else (local_blocks, layout.out_blocks)
    max_fan_out = None if by_column else layout.max_fan_out
    # Ascending indices of slots: the blocks of a shard stay in canonical order, as a layout wants
    # them.
    members = [np.flatnonzero(shard_of_block == shard) for shard in range(shards)]
    shard_layouts = tuple(
        BlockLayout(layout.block, *grid, rows[at], cols[at], max_fan_out) for at in members
    )
    order = np.concatenate(members).astype(np.int32)
    return ShardedLayout(shard_layouts, order, _stacked(shard_layouts, fan, by_column))


def _stacked(shard_layouts, fan, by_column):
    """Stack the shards' tables, padded to one width; `fan` sets the unsharded side's width."""
    tables = [shard.tables() for shard in shard_layouts]
    fan_in = max(each.in_index.shape[1] for each in tables)
    fan_out = max(each.out_index.shape[1] for each in tables)
    if fan is not None:
        fan_in, fan_out = (fan_in, fan) if by_column else (fan, fan_out)
    return stack_tables([pad_tables(each, fan_in, fan_out) for each in tables])
