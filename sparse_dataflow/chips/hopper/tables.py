"""Tables of the Hopper kernels: merged lines, and float32 products as sums of bfloat16 products.

Merging puts adjacent lines into one tile, which then reads a block of features once for all of
them.  Two merged lines of block 64 make a tile as wide as a block of 128.  If only one of the lines
stores a block, the other's half is multiplied as zeros: TMA fills reads outside `values` with
zeros, so no zeros are stored.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Table = np.ndarray | jax.Array
"""A static layout's table, or an evolving one's, traced."""

TERMS = ((0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0))
"""Pairs of bfloat16 components of the two factors that are multiplied.  The omitted pairs are below
2⁻²⁵ of the product, a rounding of float32 (arXiv 1904.06376)."""

COMPONENTS = 3
"""bfloat16 numbers that sum to a float32."""


class LineTables(NamedTuple):
    """Tables of merged lines, int32.

    Attributes:
      index: [lines, fan], the block of features that a position reads.
      slot: [lines, fan, width], place in `values` of each merged line's block.  Padding positions
        have -1.  Stored positions have nnz, outside `values`, for lines without this block.
    """

    index: Table  # type: ignore[assignment]
    slot: Table


def merge_lines(index: Table, slot: Table, width: int, others: int, stored: int) -> LineTables:
    """Merge every `width` adjacent lines.

    Args:
      index: int32 [lines, fan], `LayoutTables.in_index` or `out_index`.
      slot: int32 [lines, fan], `LayoutTables.in_slot` or `out_slot`.
      width: number of lines to merge.
      others: number of blocks of the side that `index` points into.
      stored: number of stored blocks.

    Returns:
      Tables [ceil(lines / width), merged fan]: numpy tables as wide as the longest line, traced
      tables as wide as any layout of this fan needs.
    """
    concrete = isinstance(index, np.ndarray) and isinstance(slot, np.ndarray)
    xp = np if concrete else jnp
    index, slot = xp.asarray(index), xp.asarray(slot)
    if width == 1:
        return LineTables(index, slot[..., None])
    extra = ((0, -len(slot) % width), (0, 0))
    index = xp.pad(index, extra).reshape(-1, width * slot.shape[1])
    line_of_entry = xp.repeat(xp.arange(width), slot.shape[1])
    slot = xp.pad(slot, extra, constant_values=-1).reshape(index.shape)
    # Comparisons instead of a sort: lines are short, and XLA fuses comparisons into few kernels.
    same_block = (index[:, :, None] == index[:, None, :]) & (slot[:, None, :] >= 0)
    earlier = xp.arange(index.shape[1])[:, None] > xp.arange(index.shape[1])
    first = (slot >= 0) & ~(same_block & earlier).any(2)
    # Lines that read blocks [2 5] and [5 7] have the entries [2 5 5 7].  `first` is [1 1 0 1],
    # `rank` [0 1 -1 2], and `place` [0 1 1 2].  The merged line reads [2 5 7], and 5 has two slots.
    rank = xp.where(first, xp.cumsum(first, axis=1) - 1, -1)
    place = xp.where(same_block, rank[:, None, :], -1).max(2)
    fan = int(max(1, first.sum(1).max())) if concrete else min(index.shape[1], others)
    matches = (place[:, :, None] == xp.arange(fan)) & (slot >= 0)[:, :, None]
    merged = xp.where(matches, index[:, :, None], 0).max(1)
    slots = [
        xp.where(matches & (line_of_entry == line)[:, None], slot[:, :, None], -1).max(1)
        for line in range(width)
    ]
    slots = xp.stack(slots, axis=-1)
    any_stored = (slots >= 0).any(-1, keepdims=True)
    slots = xp.where(any_stored & (slots < 0), stored, slots)
    return LineTables(xp.asarray(merged, np.int32), xp.asarray(slots, np.int32))


def split_float32(array: jax.Array) -> list[jax.Array]:
    """Split float32 into three bfloat16 arrays whose sum is within 2⁻²⁵ of each number."""
    components = []
    for _ in range(COMPONENTS):
        # XLA may remove a conversion to bfloat16 and back, but not reduce_precision.
        high = jax.lax.reduce_precision(array, exponent_bits=8, mantissa_bits=7)
        components.append(high.astype(jnp.bfloat16))
        array = jnp.where(jnp.isfinite(high), array - high, 0)
    return components


def expand_terms(tables: LineTables, others: int, stored: int) -> LineTables:
    """Expand tables so that every stored block multiplies its TERMS.

    Args:
      tables: tables of merged lines.
      others: blocks of features of one component; the operand concatenates its components.
      stored: stored blocks of one component; `values` concatenates its components.
    """
    x_component, value_component = np.array(TERMS, np.int32).T
    index = tables.index[:, :, None] + x_component * others
    slot = tables.slot[:, :, None, :]
    # A line without this block reads behind all components, where TMA finds zeros; padding stays
    # -1.
    outside = jnp.where(slot < 0, slot, COMPONENTS * stored)
    slot = jnp.where(
        (slot >= 0) & (slot < stored), slot + value_component[:, None] * stored, outside
    )
    lines, fan = tables.index.shape
    shape = lines, fan * len(TERMS)
    return LineTables(index.reshape(shape), slot.reshape(*shape, -1))
