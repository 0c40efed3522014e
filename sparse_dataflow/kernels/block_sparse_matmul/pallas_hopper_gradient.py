"""dW at the stored blocks on a Hopper GPU: a producer follows the table, two consumers multiply.

A unit is what one consumer sums: `width` stored blocks of one block column (two of 64), or a
tile of 128 x 128 of a larger block.  wgmma makes 64 rows at least, so a block of 32 is multiplied
together with its neighbour, whose half is dropped: half the rate.  Adjacent columns that lie side
by side (`pallas_hopper_tables`) are one column, whose sums are as wide.  Units are numbered column
by column, so that the two of a program mostly share a column: then dy is copied once for both.  A
column that stores fewer blocks than the longest leaves units empty; a pair of them is skipped.  One
persistent program a multiprocessor takes pairs of units, one after another; for each it passes over
all tokens through a ring of stages.

What bounds the rate is the L2 cache: at block 128 a pair reads 2 * 3 * 128 bytes a token for
2 * 128² multiply-adds, 48 bytes a cycle and multiprocessor at the full rate of the tensor cores;
at block 64, 80, or 48 where two columns lie side by side.

Pairs rarely fill a whole number of waves.  Where the last wave repays it, a second kernel sums its
pairs in shares of the tokens, in float32, one share a program; XLA adds the shares.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sparse_dataflow.kernels.block_sparse_matmul.pallas_hopper_gradient_kernel import (
    GradientPlan,
    unit_sums,
)
from sparse_dataflow.kernels.block_sparse_matmul.pallas_hopper_tables import LineTables
from sparse_dataflow.kernels.block_sparse_matmul.tuning_hopper import CONSUMERS, GradientTiles


def line_gradient(
    x: jax.Array,
    dy: jax.Array,
    tables: LineTables,
    tiles: GradientTiles,
    *,
    result: jax.ShapeDtypeStruct,
    accumulator: jax.Array | None = None,
    multiprocessors: int,
) -> jax.Array:
    """xᵀ dy at the stored blocks, or accumulator + that.

    Args:
      x: bfloat16 [tokens, in_features].
      dy: bfloat16 [tokens, out_features].
      tables: the weight's columns, as many side by side as the tiles have.
      tiles: the tile sizes.
      result: [nnz, block, block], bfloat16 or float32.
      accumulator: float32 of the result's shape.
      multiprocessors: of the device.

    Returns:
      The result; float32 with an accumulator.
    """
    stored, block = result.shape[:2]
    stages = pl.cdiv(len(x), tiles.depth)
    columns, fan = tables.index.shape
    plan = GradientPlan(tiles, block, columns, fan, stored, steps=stages, first=0, pairs=0)
    pairs = pl.cdiv(plan.units, CONSUMERS)
    last = pairs % multiprocessors if tiles.splits > 1 else 0
    # A block of several units is summed by one kernel.
    whole = (pairs - last) * CONSUMERS // plan.parts**2 * plan.parts**2 // CONSUMERS
    operands = (x, dy, tables)
    if whole:
        plan = plan._replace(pairs=whole)
        dtype = result.dtype if accumulator is None else accumulator.dtype
        made = jax.ShapeDtypeStruct(result.shape, dtype)
        total = unit_sums(*operands, plan, made, accumulator, multiprocessors=multiprocessors)
    else:
        total = jnp.zeros(result.shape, result.dtype) if accumulator is None else accumulator
    if whole == pairs:
        return total
    plan = plan._replace(
        first=whole,
        pairs=pairs - whole,
        shares=tiles.splits,
        steps=pl.cdiv(stages, tiles.splits),
        apart=True,
    )
    shape = jax.ShapeDtypeStruct((plan.shares * plan.blocks, block, block), jnp.float32)
    sums = unit_sums(*operands, plan, shape, multiprocessors=multiprocessors)
    sums = sums.reshape(plan.shares, plan.blocks, block, block).sum(0)
    slots = _slots(jnp.asarray(tables.slot)[..., 0], plan)
    if accumulator is not None:
        sums = sums + accumulator[jnp.maximum(slots, 0)]
    return total.at[jnp.where(slots < 0, stored, slots)].set(sums.astype(total.dtype), mode="drop")


def _slots(slot, plan):
    """The slots of the plan's blocks, -1 where a column lacks one."""
    padding = -slot.shape[1] % plan.tiles.width
    slots = jnp.pad(slot, ((0, 0), (0, padding)), constant_values=-1).reshape(-1)
    return slots[plan.first_block : plan.first_block + plan.blocks]
