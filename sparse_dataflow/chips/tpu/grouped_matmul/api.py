"""The product of a weight of equal groups on TPUs: all three products.

Each group is one dense product, so the kernels need no index tables and copy no weight: they reach
the matrix unit's rate where a group's sides are multiples of its width.  Activations are padded,
which copies them, only if the tokens are not a multiple of 16 (for dW also if fewer than 128).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from sparse_dataflow.chips.tpu.grouped_matmul import kernels
from sparse_dataflow.chips.tpu.grouped_matmul import tuning as sizes
from sparse_dataflow.chips.tpu.grouped_matmul.tuning import GroupedTuning
from sparse_dataflow.chips.tpu.grouped_matmul.windows import Columns
from sparse_dataflow.chips.tpu.matmul.shapes import pad_to
from sparse_dataflow.chips.tpu.matmul.tuning import LANES, limits
from sparse_dataflow.core.layouts.layout import Groups, LayoutTables
from sparse_dataflow.core.ops import derivatives
from sparse_dataflow.core.ops.block_sparse_matmul import grouped
from sparse_dataflow.core.ops.dispatch import Shaped

DTYPES = ("bfloat16", "float32")
"""Legal dtypes of x and weight."""


def product(
    x: jax.Array,
    weight: jax.Array,
    sides: tuple[Columns, Columns],
    tuning: GroupedTuning | None = None,
) -> jax.Array:
    """Compute x W of groups whose runs are whole lanes; differentiable in x and weight.

    Args:
      x: bfloat16 or float32 [tokens, in_features].
      weight: [count, in_features / count, out_features / count] in x's dtype; a group's rows and
        columns ascend.
      sides: columns of x and of y that each group has.
      tuning: tile sizes; None for `default_tuning`.

    Returns:
      [tokens, out_features] in x's dtype; sums in float32.
    """
    tuning = tuning or sizes.choose_tuning(padded_tokens(x), sides, x.dtype.itemsize)
    return _matmul((tuning, sides), x, weight)


def lane_groups(groups: Groups, weight: Shaped, block: int) -> Groups:
    """Return the groups that TPU kernels see: contiguous inputs if runs are no whole lanes."""
    if groups.in_run * block % LANES == 0:
        return groups
    return dataclasses.replace(groups, in_run=weight.shape[1] // block)


def on_lanes(x: jax.Array, groups: Groups, weight: Shaped, block: int) -> jax.Array:
    """Return the columns of x in the order of `lane_groups`."""
    if lane_groups(groups, weight, block) == groups:
        return x
    # [tokens, runs, groups, run] -> [tokens, groups, runs, run]: a group's inputs are one run then.
    return grouped.split(x, groups.count, groups.in_run * block).swapaxes(1, 2).reshape(x.shape)


def products(
    x: jax.Array,
    weight: jax.Array,
    groups: Groups,
    *,
    block: int,
    tuning: GroupedTuning | None = None,
) -> jax.Array:
    """Compute x W of groups whose runs may be narrower than the lanes; see `grouped.Products`."""
    x, groups = on_lanes(x, groups, weight, block), lane_groups(groups, weight, block)
    return product(x, weight, sides_of(weight, groups, block), tuning)


def block_sparse_matmul(
    x: jax.Array,
    values: jax.Array,
    tables: LayoutTables,
    *,
    tuning: GroupedTuning | None = None,
) -> jax.Array:
    """Compute `grouped.block_sparse_matmul` of bfloat16 or float32."""
    kernels = functools.partial(products, tuning=tuning)
    return grouped.block_sparse_matmul(x, values, tables, products=kernels)


def block_sparse_matmul_refusal(x: Shaped, values: Shaped, tables: LayoutTables) -> str:
    """Return why the target TPU cannot run stored blocks; empty if it can."""
    groups, block = tables.groups, values.shape[-1]
    if groups is None:
        return grouped.block_sparse_matmul_refusal(x, values, tables)
    shapes = grouped.operand_shapes(x, values, tables, groups)
    return groups_refusal(*shapes, lane_groups(groups, shapes[1], block), block=block)


def groups_refusal(x: Shaped, weight: Shaped, groups: Groups, *, block: int) -> str:
    """Return why the target TPU cannot run the operands of `product`; empty if it can."""
    if x.ndim != 2 or weight.ndim != 3:
        legal = "[tokens, in_features] and [groups, inputs of a group, outputs of a group]"
        return f"x has shape {x.shape} and weight has {weight.shape}; legal: {legal}."
    if x.dtype != weight.dtype or x.dtype not in DTYPES:
        return f"x is {x.dtype} and weight is {weight.dtype}; legal: one of {', '.join(DTYPES)}."
    sides = sides_of(weight, groups, block)
    if len(weight) != groups.count or x.shape[1] != sides[0].features:
        legal = f"[tokens, {groups.count * weight.shape[1]}] and {groups.count} groups"
        return f"x has shape {x.shape} and weight has {weight.shape}; legal: {legal}."
    for side, columns in zip(("in", "out"), sides):
        if columns.run % LANES or columns.width % columns.run:
            return (
                f"a group has {columns.width} {side}put features in runs of {columns.run}; "
                f"legal: whole runs of a multiple of {LANES}."
            )
    if len(x) and default_tuning(x, weight, groups, block=block) is None:
        return f"no tile of a group {weight.shape[1:]} fits VMEM; legal: more groups."
    return ""


def default_tuning(
    x: Shaped, weight: Shaped, groups: Groups, *, block: int
) -> GroupedTuning | None:
    """Return the tile sizes for these shapes on the target TPU; None if no tile fits VMEM."""
    sides = sides_of(weight, groups, block)
    return sizes.choose_tuning(padded_tokens(x), sides, x.dtype.itemsize)


def sides_of(weight: Shaped, groups: Groups, block: int) -> tuple[Columns, Columns]:
    """Return the columns of x and of y that each group of a weight [count, K, N] has."""
    return (
        Columns(groups.count, groups.in_run * block, weight.shape[1]),
        Columns(groups.count, groups.out_run * block, weight.shape[2]),
    )


def _gradients(options, x, weight, dy):
    tuning, sides = options
    rows = pad_rows(x, LANES), pad_rows(dy, LANES)
    dweight = kernels.gradient(*rows, sides, tuning.weight_gradient, **limits(tuning))
    tiles, sides = tuning.input_gradient, sides[::-1]
    dx = kernels.product(pad_rows(dy), weight, sides, tiles, transposed=True, **limits(tuning))
    return dx[: len(x)], dweight


def _value(options, x, weight):
    tuning, sides = options
    tiles = tuning.forward
    y = kernels.product(pad_rows(x), weight, sides, tiles, transposed=False, **limits(tuning))
    return y[: len(x)]


def padded_tokens(x: Shaped) -> int:
    """Return the rows that `pad_rows` pads x to."""
    return -(-len(x) // sizes.ROWS) * sizes.ROWS


def pad_rows(array: jax.Array, least: int = 0) -> jax.Array:
    """Pad [tokens, features] with zero rows to a multiple of ROWS, and to at least `least`."""
    rows = least if len(array) < least else sizes.ROWS
    return pad_to(array, array.shape[1], rows)


def by_group(bias: jax.Array, columns: Columns) -> jax.Array:
    """Return the bias of each group, float32 [groups, 1, width]."""
    runs = bias.astype(jnp.float32).reshape(-1, columns.groups, columns.run)
    # [runs, groups, run] -> [groups, 1, runs * run].
    return runs.swapaxes(0, 1).reshape(columns.groups, 1, columns.width)


def from_group(bias: jax.Array, columns: Columns) -> jax.Array:
    """Return [groups, 1, width] as [features]; the inverse of `by_group`."""
    return bias.reshape(columns.groups, -1, columns.run).swapaxes(0, 1).reshape(-1)


_matmul = derivatives.kernel_product(_value, _gradients)
