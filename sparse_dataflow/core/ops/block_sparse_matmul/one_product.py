"""The block-sparse matmul as one call of a product that a user gives."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sparse_dataflow.core.layouts.layout import BlockLayout, LayoutTables, index_tables


def by_one_product(
    product: Callable, x: jax.Array, values: jax.Array, layout: BlockLayout | LayoutTables
) -> jax.Array:
    """Computes `x @ W` for x [..., in_features] and values [nnz, block, block].

    Args:
      product: (left, right, dimension numbers) -> product, as `lax.dot_general`.  It multiplies the
        dense kernel where all blocks are stored; else, as a batch, the gathered input blocks
        [tokens, out_blocks, inputs] and the stored blocks [out_blocks, inputs, block].
    """
    tables = index_tables(layout)
    in_blocks, out_blocks = tables.grid
    fan_in, block = tables.in_index.shape[-1], values.shape[-1]
    if len(values) == in_blocks * out_blocks:
        kernel = values.reshape(out_blocks, in_blocks, block, block).transpose(1, 2, 0, 3)
        kernel = kernel.reshape(in_blocks * block, -1)
        return product(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))
    is_stored = jnp.asarray(tables.in_slot >= 0)
    weights = jnp.where(is_stored[..., None, None], values[tables.in_slot], 0)
    rows = x.reshape(-1, in_blocks, block)[:, tables.in_index]
    rows = jnp.where(is_stored[..., None], rows, 0).reshape(-1, out_blocks, fan_in * block)
    weights = weights.reshape(out_blocks, fan_in * block, block)
    y = product(rows, weights, (((2,), (1,)), ((1,), (0,))))
    return y.swapaxes(0, 1).reshape(*x.shape[:-1], out_blocks * block)
