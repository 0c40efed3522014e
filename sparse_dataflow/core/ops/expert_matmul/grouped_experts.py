"""The products of block-sparse experts, whose layouts are equal groups."""

import jax

from sparse_dataflow.core.layouts.layout import BlockLayout, LayoutTables, index_tables
from sparse_dataflow.core.ops.block_sparse_matmul import grouped
from sparse_dataflow.core.ops.expert_matmul.expert_matmul_op import expert_matmul


def expert_products(
    x: jax.Array, values: jax.Array, layout: BlockLayout | LayoutTables, tiles: jax.Array
) -> jax.Array:
    """Multiplies the rows of each expert with its weight, a group of inputs at a time.

    Args:
      x: [rows, in], in equal tiles.
      values: [experts, nnz, block, block] in the dtype of x, of one layout.
      layout: of equal groups.
      tiles: int32 [tiles], the expert of each.

    Returns:
      [rows, out].
    """
    tables, block = index_tables(layout), values.shape[-1]
    groups = tables.groups
    assert groups is not None
    weights = grouped.group_values(values, tables, groups)
    x = grouped.own_inputs(x, tables, groups, block)
    by_group = grouped.split(x, groups.count, groups.in_run * block).swapaxes(1, 2)
    y = expert_matmul(by_group.reshape(len(x), groups.count, -1), weights, tiles)
    y = y.reshape(len(x), groups.count, -1, groups.out_run * block).swapaxes(1, 2)
    return grouped.among_outputs(y.reshape(len(x), -1), tables, groups, block)
