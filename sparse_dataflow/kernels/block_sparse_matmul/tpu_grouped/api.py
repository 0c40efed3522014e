"""The product of a weight of equal groups on TPUs: all three products.

Each group is one dense product, so the kernels need no index tables and copy no weight: they reach
the matrix unit's rate where a group's sides are multiples of its width.  Activations are padded,
which copies them, only if the tokens are not a multiple of 16 (for dW also if fewer than 128).
"""

import dataclasses

import jax
import jax.numpy as jnp

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels.block_sparse_matmul import fused, grouped
from sparse_dataflow.kernels.block_sparse_matmul.tpu.shapes import pad_to
from sparse_dataflow.kernels.block_sparse_matmul.tpu.tuning import LANES, limits
from sparse_dataflow.kernels.block_sparse_matmul.tpu_grouped import kernels
from sparse_dataflow.kernels.block_sparse_matmul.tpu_grouped import tuning as sizes
from sparse_dataflow.kernels.block_sparse_matmul.tpu_grouped.tuning import GroupedTuning
from sparse_dataflow.kernels.block_sparse_matmul.tpu_grouped.windows import Columns
from sparse_dataflow.kernels.dispatch import Shaped
from sparse_dataflow.sparsity.layout import Groups

DTYPES = ("bfloat16", "float32")
"""Legal dtypes of x and weight."""


@dataclasses.dataclass(frozen=True)
class Options(fused.Options):
    """Static options of the op.

    Attributes:
      sides: columns of x and of y.
    """

    sides: tuple[Columns, Columns]


def grouped_matmul(
    x: jax.Array,
    weight: jax.Array,
    groups: Groups,
    *,
    block: int,
    tuning: GroupedTuning | None = None,
) -> jax.Array:
    """Compute x W; differentiable in x and weight.

    Args:
      x: bfloat16 or float32 [tokens, in_features].
      weight: [count, in_features / count, out_features / count] in x's dtype; a group's rows and
        columns ascend.
      groups: which blocks of x and y each group has.
      block: features of a block.
      tuning: tile sizes; None for `default_tuning`.

    Returns:
      [tokens, out_features] in x's dtype; sums in float32.

    Raises:
      UserError: if `refusal` gives a reason.
    """
    if reason := refusal(x, weight, groups, block=block):
        raise UserError(f"grouped_matmul on TPU: {reason}")
    sides = sides_of(weight, groups, block)
    if len(x) == 0:
        return jnp.zeros((0, sides[1].features), x.dtype)
    tuning = tuning or default_tuning(x, weight, groups, block=block)
    return _matmul(Options(False, tuning, sides[1].features, sides), x, weight, None, ())


def lane_groups(groups: Groups, weight: Shaped, block: int) -> Groups:
    """Return the groups that TPU kernels see: contiguous inputs if runs are no whole lanes."""
    if groups.in_run * block % LANES == 0:
        return groups
    return dataclasses.replace(groups, in_run=weight.shape[1] // block)


def on_lanes(x: jax.Array, groups: Groups, weight: Shaped, block: int) -> jax.Array:
    """Return the columns of x in the order of `lane_groups`."""
    if lane_groups(groups, weight, block) == groups:
        return x
    return grouped.split(x, groups.count, groups.in_run * block).swapaxes(1, 2).reshape(x.shape)


def products(x: jax.Array, weight: jax.Array, groups: Groups, *, block: int) -> jax.Array:
    """Compute x W of groups whose runs may be narrower than the lanes; see `grouped.Products`."""
    x = on_lanes(x, groups, weight, block)
    return grouped_matmul(x, weight, lane_groups(groups, weight, block), block=block)


def refusal(x: Shaped, weight: Shaped, groups: Groups, *, block: int) -> str:
    """Return why the target TPU cannot run these operands; empty if it can."""
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


def _gradients(options, x, weight, before, dy, tables):
    del before, tables
    dweight = kernels.gradient(
        pad_rows(x, LANES),
        pad_rows(dy, LANES),
        options.sides,
        options.tuning.weight_gradient,
        **limits(options.tuning),
    )
    dx = kernels.product(
        pad_rows(dy),
        weight,
        options.sides[::-1],
        options.tuning.input_gradient,
        transposed=True,
        **limits(options.tuning),
    )
    return dx[: len(x)], dweight, dy, None


def _product(options, x, weight, bias, tables, keep):
    del bias, tables, keep
    y = kernels.product(
        pad_rows(x),
        weight,
        options.sides,
        options.tuning.forward,
        transposed=False,
        **limits(options.tuning),
    )
    return [y[: len(x)]]


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
    return runs.swapaxes(0, 1).reshape(columns.groups, 1, columns.width)


def from_group(bias: jax.Array, columns: Columns) -> jax.Array:
    """Return [groups, 1, width] as [features]; the inverse of `by_group`."""
    return bias.reshape(columns.groups, -1, columns.run).swapaxes(0, 1).reshape(-1)


_matmul = fused.differentiable(_product, _gradients)
