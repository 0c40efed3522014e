"""Layouts sharded over the tensor axis: the tables of each shard and the order of its blocks.

On the mesh, the values of a row-parallel projection are ordered by shard. Checkpoints and all other
code use the canonical order of the layout.
"""

from typing import Any, NamedTuple

import numpy as np

from sparse_dataflow.core.config.projections import KEY_VALUE
from sparse_dataflow.core.executors.sharding import COLUMN_PARALLEL
from sparse_dataflow.core.layouts.layout import LayoutTables, stack_tables
from sparse_dataflow.core.ops.block_sparse_matmul.cut_tables import cut_columns, cut_rows


class Cut(NamedTuple):
    """Sharded layouts of a projection.

    Attributes:
      layout: int32 [layers, shards, lines, fan], the tables of each shard, with groups if all
        layers and shards share them and layouts cannot change.
      order: int32 [layers, nnz], canonical index of each block, in the order of the shards; None if
        both orders are equal.
    """

    layout: LayoutTables
    order: np.ndarray | None


def cut(
    projection: str, layout: LayoutTables, shards: int, changing: bool, kv_copies: int = 1
) -> Cut:
    """Shards the layouts of a sparse projection.

    Args:
      projection: its name.
      layout: canonical, concrete, stacked over the layers of a group; see `gpt`.
      changing: whether the layouts may change later; the tables then fit any layout.
      kv_copies: consecutive shards of `k` and `v` that are equal; see
        `executors.mesh_axes.key_value_copies`.

    Raises:
      UserError: the shards of a layout would store different numbers of blocks.
    """
    copies = kv_copies if projection in KEY_VALUE else 1
    shards //= copies
    column_parallel = projection in COLUMN_PARALLEL
    divide = cut_columns if column_parallel else cut_rows
    layouts = layout.layouts(block=1)
    lines = np.shape(layout.in_index if column_parallel else layout.out_index)[1]
    # A line of a shard has at most the shard's blocks, and at most the blocks of the whole line.
    across = np.shape(layout.out_index if column_parallel else layout.in_index)[2]
    width = min(across, lines // shards)
    if not changing:
        sharded = [divide(each, shards) for each in layouts]
        index = 2 if column_parallel else 0
        width = max(each.tables.arrays[index].shape[2] for each in sharded)
    # One width for all layers and shards: their tables are stacked, and a scan has one program.
    sharded = [divide(each, shards, width) for each in layouts]
    order = None if column_parallel else np.stack([each.order for each in sharded])
    stacked = stack_tables([each.tables for each in sharded])
    # Consecutive devices share a key/value head, so its tables are repeated side by side.
    copied: list[Any] = [np.repeat(table, copies, axis=1) for table in stacked.arrays]
    stacked = LayoutTables(*copied)
    return Cut(stacked if changing else stacked.with_groups(), order)


def inverse(order: np.ndarray) -> np.ndarray:
    """Returns the inverse permutation of each row: int32 [layers, nnz]."""
    # Sorting a permutation inverts it.
    return np.argsort(order, axis=1).astype(np.int32)
