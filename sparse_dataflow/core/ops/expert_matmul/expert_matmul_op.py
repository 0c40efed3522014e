"""The product of a mixture of experts: each row times the matrices of its expert."""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.core.layouts.layout import BlockLayout, LayoutTables, index_tables
from sparse_dataflow.core.ops import dispatch, platforms
from sparse_dataflow.core.ops.expert_matmul import expert_tiles as tiles


def expert_matmul(x_SxGxD: jax.Array, weights_ExGxDxF: jax.Array, tiles_T: jax.Array) -> jax.Array:
    """Multiplies rows, sorted by expert, with the matrices of their experts.

    Args:
      x_SxGxD: S rows in T tiles of S / T rows, each in G parts of D features.
      weights_ExGxDxF: a matrix for each expert and part; G is 1 for a dense weight.
      tiles_T: int32 [T], ascending, the expert of each tile; E for a tile whose products are not
        read.

    Returns:
      [S, G, F], in the dtype of x: each part of a row times the matrix of its expert and part.
    """
    if dispatch.on(platforms.EXPERT_LOOP):
        return tiles.expert_matmul(x_SxGxD, weights_ExGxDxF, tiles_T)
    return ragged(x_SxGxD, weights_ExGxDxF, tiles_T)


def ragged(x_SxGxD: jax.Array, weights_ExGxDxF: jax.Array, tiles_T: jax.Array) -> jax.Array:
    """Computes `expert_matmul` as one `jax.lax.ragged_dot`, over (part, expert) in this order."""
    rows, parts, inputs = x_SxGxD.shape
    experts, _, _, outputs = weights_ExGxDxF.shape
    # A tile without an expert counts to the last one, as sizes must add up to all rows.  Its
    # products are not read.
    tiles_T = jnp.minimum(tiles_T, experts - 1)
    sizes = jnp.bincount(tiles_T, length=experts) * (rows // len(tiles_T))
    # The rows of a part follow those of all tiles of the part before.
    y = lax.ragged_dot(
        x_SxGxD.swapaxes(0, 1).reshape(parts * rows, inputs),
        weights_ExGxDxF.swapaxes(0, 1).reshape(parts * experts, inputs, outputs),
        jnp.tile(sizes.astype(jnp.int32), parts),
    )
    return y.reshape(parts, rows, outputs).swapaxes(0, 1)


def grouped_products(
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
    from sparse_dataflow.core.ops.block_sparse_matmul import grouped

    tables, block = index_tables(layout), values.shape[-1]
    groups = tables.groups
    assert groups is not None
    weights = grouped.group_values(values, tables, groups)
    x = grouped.own_inputs(x, tables, groups, block)
    # Tokens stay the first axis, so that a tile has consecutive rows in every group.
    by_group = grouped.split(x, groups.count, groups.in_run * block).swapaxes(1, 2)
    y = expert_matmul(by_group.reshape(len(x), groups.count, -1), weights, tiles)
    y = y.reshape(len(x), groups.count, -1, groups.out_run * block).swapaxes(1, 2)
    return grouped.among_outputs(y.reshape(len(x), -1), tables, groups, block)
