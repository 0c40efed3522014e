"""dW at the stored blocks on a Hopper GPU: a producer gathers by the table, two consumers multiply.

A unit is the work of one consumer: `width` stored blocks of one block column (two of 64), or a
128 x 128 tile of a larger block.  wgmma computes at least 64 rows, so a block of 32 is multiplied
with its neighbour, whose half is dropped: half the rate.  Merged columns (`hopper.tables`)
count as one column with wider sums.  Units are numbered by column, so that the two units of a pair
mostly share a column, and dy is copied once for both.  A column with fewer blocks than the longest
has empty units; a pair of empty units is skipped.  One persistent program per multiprocessor
processes pairs in turn; each pair passes over all tokens through a ring of stages.

The L2 cache bounds the rate.  At block 128 a pair reads 2 * 3 * 128 bytes per token for 2 * 128²
multiply-adds: 48 bytes per cycle and multiprocessor at the full rate of the tensor cores.  At block
64 it is 80 bytes, or 48 for two merged columns.

Pairs rarely fill a whole number of waves.  If it saves time, a second kernel splits the tokens of
the last wave's pairs: it writes one float32 partial sum per split, and XLA adds them.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sparse_dataflow.chips.hopper.gradient_kernel import GradientPlan, unit_sums
from sparse_dataflow.chips.hopper.tables import LineTables
from sparse_dataflow.chips.hopper.tuning import CONSUMERS, GradientTiles


def line_gradient(
    x: jax.Array,
    dy: jax.Array,
    tables: LineTables,
    tiles: GradientTiles,
    *,
    result: jax.ShapeDtypeStruct,
    multiprocessors: int,
) -> jax.Array:
    """Compute xᵀ dy at the stored blocks.

    Args:
      x: bfloat16 [tokens, in_features].
      dy: bfloat16 [tokens, out_features].
      tables: the weight's columns, `tiles.lines` merged in each.
      tiles: the tile sizes.
      result: shape and dtype of what is returned, [nnz, block, block] in bfloat16 or float32.
      multiprocessors: number of multiprocessors of the device.
    """
    stored, block = result.shape[:2]
    stages = pl.cdiv(len(x), tiles.depth)
    columns, fan = tables.index.shape
    plan = GradientPlan(tiles, block, columns, fan, stored, steps=stages, first_pair=0, pairs=0)
    pairs = pl.cdiv(plan.units, CONSUMERS)
    # Pairs of the last wave, in which the other multiprocessors would be idle.
    last = pairs % multiprocessors if tiles.splits > 1 else 0
    # One kernel must sum all units of a block.
    whole = (
        (pairs - last) * CONSUMERS // plan.tiles_per_side**2 * plan.tiles_per_side**2 // CONSUMERS
    )
    operands = (x, dy, tables)
    if whole:
        plan = plan._replace(pairs=whole)
        total = unit_sums(*operands, plan, result, multiprocessors=multiprocessors)
    else:
        total = jnp.zeros(result.shape, result.dtype)
    if whole == pairs:
        return total
    plan = plan._replace(
        first_pair=whole,
        pairs=pairs - whole,
        splits=tiles.splits,
        steps=pl.cdiv(stages, tiles.splits),
        partial=True,
    )
    shape = jax.ShapeDtypeStruct((plan.splits * plan.blocks, block, block), jnp.float32)
    sums = unit_sums(*operands, plan, shape, multiprocessors=multiprocessors)
    # Splits of the tokens are summed here, in a fixed order, and not by atomic additions.
    sums = sums.reshape(plan.splits, plan.blocks, block, block).sum(0)
    slots = _slots(jnp.asarray(tables.slot)[..., 0], plan)
    # -1 would be the last block; `stored` is out of bounds, and dropped.
    return total.at[jnp.where(slots < 0, stored, slots)].set(sums.astype(total.dtype), mode="drop")


def _slots(slot, plan):
    """Return the slots of the plan's blocks, -1 for padding."""
    padding = -slot.shape[1] % plan.tiles.width
    slots = jnp.pad(slot, ((0, 0), (0, padding)), constant_values=-1).reshape(-1)
    return slots[plan.first_block : plan.first_block + plan.blocks]
