"""Stored blocks and dense matrices of stacked layers: conversions, norms, and new layouts.

Shapes in comments: L layers, nnz stored blocks, b side of a block.
"""

import functools

import jax
import jax.numpy as jnp


@jax.jit
def gather_blocks(values: jax.Array, sources: jax.Array) -> jax.Array:
    """Returns values (or moments) at new layouts: the same bits if a block stays, 0 if it is new.

    Args:
      values: float [layers, nnz, ...] at the old layouts.
      sources: int32 [layers, new nnz], from `layouts.evolution.block_sources`.
    """
    # [L, 1] and sources [L, new nnz] broadcast: each layer takes its own blocks.
    layer = jnp.arange(len(values))[:, None]
    gathered = values[layer, jnp.maximum(sources, 0)]
    stays = (sources >= 0).reshape(*sources.shape, *(1,) * (values.ndim - 2))
    return jnp.where(stays, gathered, 0)


@functools.partial(jax.jit, static_argnames="grid")
def expand(rows: jax.Array, cols: jax.Array, values: jax.Array, grid: tuple[int, int]) -> jax.Array:
    """[L, nnz, b, b] at rows, cols [L, nnz] of a grid of blocks -> dense [L, in, out]."""
    layers, _, block, _ = values.shape
    blocks = jnp.zeros((layers, *grid, block, block), values.dtype)
    blocks = blocks.at[jnp.arange(layers)[:, None], rows, cols].set(values)
    # [L, in_blocks, out_blocks, b, b] -> [L, in_blocks, b, out_blocks, b].
    return blocks.swapaxes(2, 3).reshape(layers, grid[0] * block, grid[1] * block)


@functools.partial(jax.jit, static_argnames="block")
def collect(rows: jax.Array, cols: jax.Array, dense: jax.Array, block: int) -> jax.Array:
    """The inverse of `expand`: dense [L, in, out] -> [L, nnz, b, b] at rows, cols [L, nnz]."""
    blocks = _grid(dense, block)
    # Indices on both sides of a slice move to the front: [L, nnz, b, b].
    return blocks[jnp.arange(len(dense))[:, None], rows, :, cols]


@jax.jit
def stored_norms(values: jax.Array) -> jax.Array:
    """Euclidean norms of stored blocks: [L, nnz, b, b] -> [L, nnz]."""
    return jnp.sqrt(jnp.sum(jnp.square(values), axis=(2, 3)))


@functools.partial(jax.jit, static_argnames="block")
def grid_norms(dense: jax.Array, block: int) -> jax.Array:
    """Euclidean norms of all blocks: dense [L, in, out] -> [L, in_blocks, out_blocks]."""
    return jnp.sqrt(jnp.sum(jnp.square(_grid(dense, block)), axis=(2, 4)))


def _grid(dense, block):
    layers, inputs, outputs = dense.shape
    return dense.reshape(layers, inputs // block, block, outputs // block, block)
