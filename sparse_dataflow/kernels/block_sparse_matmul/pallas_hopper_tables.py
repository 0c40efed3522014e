"""Tables of the Hopper kernels: adjacent lines side by side in one tile, float32 as bfloat16 sums.

A block of 64 alone reads its tokens' features for 64 columns of the result.  Two adjacent lines
that read the same block of features share them, and the tile becomes as wide as one of a block of
128.  Where only one of the lines stores a block, the other's half is zeros: TMA fills what lies
outside of `values`, so nothing is stored for it, but it is multiplied.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

TERMS = ((0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (2, 0))
"""Which parts of the two factors are multiplied, of three bfloat16 numbers that sum to a float32:
what is left out is below 2⁻²⁵ of the product, a rounding of float32 (arXiv 1904.06376)."""

PARTS = 3


class LineTables(NamedTuple):
    """Lines side by side, int32.

    Attributes:
      index: [lines, fan], the block of features that a position reads.
      slot: [lines, fan, width], place in `values` of each line's block; -1 after the last
        position, and the number of stored blocks, which lies outside, where only others store one.
    """

    index: Any
    slot: Any


def side_by_side(index: Any, slot: Any, width: int, others: int, stored: int) -> LineTables:
    """Tables of so many adjacent lines in one.

    Args:
      index: int32 [lines, fan], as `LayoutTables.in_index` or `out_index`.
      slot: int32 [lines, fan].
      width: lines in one.
      others: blocks that `index` counts.
      stored: number of stored blocks.

    Returns:
      [ceil(lines / width), fan'] tables: numpy ones as narrow as the longest line needs, traced
      ones as wide as any could.
    """
    concrete = isinstance(index, np.ndarray) and isinstance(slot, np.ndarray)
    xp: Any = np if concrete else jnp
    index, slot = xp.asarray(index), xp.asarray(slot)
    if width == 1:
        return LineTables(index, slot[..., None])
    extra = ((0, -len(slot) % width), (0, 0))
    index = xp.pad(index, extra).reshape(-1, width * slot.shape[1])
    member = xp.repeat(xp.arange(width), slot.shape[1])
    slot = xp.pad(slot, extra, constant_values=-1).reshape(index.shape)
    # Comparisons instead of a sort: short lines, and XLA fuses them into few kernels.
    alike = (index[:, :, None] == index[:, None, :]) & (slot[:, None, :] >= 0)
    earlier = xp.arange(index.shape[1])[:, None] > xp.arange(index.shape[1])
    first = (slot >= 0) & ~(alike & earlier).any(2)
    rank = xp.where(first, xp.cumsum(first, axis=1) - 1, -1)
    place = xp.where(alike, rank[:, None, :], -1).max(2)
    fan = int(max(1, first.sum(1).max())) if concrete else min(index.shape[1], others)
    here = (place[:, :, None] == xp.arange(fan)) & (slot >= 0)[:, :, None]
    merged = xp.where(here, index[:, :, None], 0).max(1)
    slots = [
        xp.where(here & (member == line)[:, None], slot[:, :, None], -1).max(1)
        for line in range(width)
    ]
    slots = xp.stack(slots, axis=-1)
    some = (slots >= 0).any(-1, keepdims=True)
    slots = xp.where(some & (slots < 0), stored, slots)
    return LineTables(xp.asarray(merged, np.int32), xp.asarray(slots, np.int32))


def split(array: jax.Array) -> list[jax.Array]:
    """Three bfloat16 arrays that sum to a float32 one, up to 2⁻²⁵ of each number."""
    parts = []
    for _ in range(PARTS):
        # Not a conversion there and back, which XLA is free to leave out.
        high = jax.lax.reduce_precision(array, exponent_bits=8, mantissa_bits=7)
        parts.append(high.astype(jnp.bfloat16))
        array = jnp.where(jnp.isfinite(high), array - high, 0)
    return parts


def terms_of(tables: LineTables, others: int, stored: int) -> LineTables:
    """Tables that multiply the TERMS of each stored block.

    Args:
      tables: of lines side by side.
      others: blocks of features; those of the operand's parts follow one another.
      stored: number of stored blocks; their parts follow one another too.
    """
    of_x, of_values = np.array(TERMS, np.int32).T
    index = tables.index[:, :, None] + of_x * others
    slot = tables.slot[:, :, None, :]
    outside = jnp.where(slot < 0, slot, PARTS * stored)
    slot = jnp.where((slot >= 0) & (slot < stored), slot + of_values[:, None] * stored, outside)
    lines, fan = tables.index.shape
    shape = lines, fan * len(TERMS)
    return LineTables(index.reshape(shape), slot.reshape(*shape, -1))
