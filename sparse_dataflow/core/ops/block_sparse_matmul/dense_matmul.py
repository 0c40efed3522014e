"""The definition of the block-sparse matmul: a product with the dense weight."""

import jax
import jax.numpy as jnp

from sparse_dataflow.core.layouts.layout import LayoutTables


def to_dense(values: jax.Array, tables: LayoutTables) -> jax.Array:
    """Return the dense weight [in_features, out_features] of values [nnz, block, block]."""
    in_blocks, out_blocks = tables.out_index.shape[0], tables.in_index.shape[0]
    block = values.shape[-1]
    slots = jnp.asarray(tables.in_slot)
    # A padding slot of -1 would read the last block.
    stored = jnp.where((slots >= 0)[..., None, None], values[slots], 0)
    cols = jnp.broadcast_to(jnp.arange(out_blocks)[:, None], slots.shape)
    grid = jnp.zeros((in_blocks, out_blocks, block, block), values.dtype)
    # `add`, not `set`: the zeros of padding must not overwrite a block at the index that padding
    # has.
    grid = grid.at[jnp.asarray(tables.in_index), cols].add(stored)
    # [in_blocks, out_blocks, block, block] -> [in_blocks, block, out_blocks, block].
    return grid.transpose(0, 2, 1, 3).reshape(in_blocks * block, out_blocks * block)


def block_sparse_matmul(x: jax.Array, values: jax.Array, tables: LayoutTables) -> jax.Array:
    """Compute `x @ W` for x [tokens, in_features]; float32 accumulation, result in x's dtype."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    product = jnp.matmul(x, to_dense(values, tables), preferred_element_type=wide)
    return product.astype(x.dtype)
