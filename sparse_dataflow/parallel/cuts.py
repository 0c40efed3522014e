"""Layouts cut over the tensor axis: each shard's own tables, and the order of its blocks.

On the mesh, the values of a row-parallel projection are in the shards' order; checkpoints and
everything else have them in the layout's own, which is canonical.
"""

from typing import NamedTuple

import numpy as np

from sparse_dataflow.kernels.block_sparse_matmul.sharded import cut_columns, cut_rows
from sparse_dataflow.parallel.sharding import COLUMN_PARALLEL
from sparse_dataflow.sparsity.layout import BlockLayout, LayoutTables


class Cut(NamedTuple):
    """A projection's layouts, cut into shards.

    Attributes:
      tables: int32 [layers, shards, lines, fan], each shard's own.
      order: int32 [layers, nnz], the canonical place of each block in the shards' order; None where
        both are the same.
    """

    tables: LayoutTables
    order: np.ndarray | None


def cut(tables: dict[str, LayoutTables], shards: int, changing: bool) -> dict[str, Cut]:
    """The layouts of every sparse projection, cut into shards.

    Args:
      tables: canonical, concrete, stacked over the layers of a group; see `gpt`.
      shards: into how many.
      changing: whether the layouts may change later; the tables are then as wide as any could need.

    Raises:
      UserError: a layout whose shards would store unequally many blocks.
    """
    return {name: _cut(name, stacked, shards, changing) for name, stacked in tables.items()}


def _cut(name, stacked, shards, changing):
    by_column = name in COLUMN_PARALLEL
    divide = cut_columns if by_column else cut_rows
    layers = zip(*map(np.asarray, stacked))
    layouts = [BlockLayout.from_tables(LayoutTables(*layer), 1) for layer in layers]
    lines = np.shape(stacked.in_index if by_column else stacked.out_index)[1]
    # A line of one shard reaches no more blocks than the shard has, nor than it did in the whole.
    across = np.shape(stacked.out_index if by_column else stacked.in_index)[2]
    width = min(across, lines // shards)
    if not changing:
        found = [divide(layout, shards) for layout in layouts]
        index = 2 if by_column else 0
        width = max(each.tables[index].shape[2] for each in found)
    found = [divide(layout, shards, width) for layout in layouts]
    order = None if by_column else np.stack([each.order for each in found])
    return Cut(LayoutTables(*map(np.stack, zip(*(each.tables for each in found)))), order)


def inverse(order: np.ndarray) -> np.ndarray:
    """The order back: int32 [layers, nnz]."""
    return np.argsort(order, axis=1).astype(np.int32)
