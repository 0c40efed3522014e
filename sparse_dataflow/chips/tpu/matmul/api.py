"""The block-sparse matmul in Mosaic kernels for TPUs: all three products, with fused epilogues.

Tables are data (scalar prefetch): changing the layout does not recompile.  Only stored blocks are
read or written.  Blocks of 128 and 256 are tiles of the matrix unit.  Smaller blocks cost more:
- HBM pads their rows to 128 lanes: block 64 takes twice its bytes, block 32 four times.
- A tile of 128 is multiplied whole, however few of its blocks are stored (`matmul.tables`).
- Every tile is assembled in VMEM once per token tile, as much work as about 64 (block 64) or 200
  (block 32) tokens.
Chips with 256-wide matrix units (v6e) run result columns of 128 at half rate, of 256 at full rate.

The operands are padded, which copies them, only if a width is not a multiple of the tile or the
tokens are not a multiple of 16 (of 8 for 32-bit elements).
"""

import jax
import jax.numpy as jnp

from sparse_dataflow.chips.tpu.matmul import tuning as sizes
from sparse_dataflow.chips.tpu.matmul.gradient import line_gradient
from sparse_dataflow.chips.tpu.matmul.products import line_product
from sparse_dataflow.chips.tpu.matmul.shapes import (
    WeightTables,
    build_tile_tables,
    choose_tuning,
    gathers_dy,
    pad_to,
    padded_widths,
    require_tuning,
)
from sparse_dataflow.chips.tpu.matmul.tables import smem_bytes
from sparse_dataflow.chips.tpu.matmul.tuning import TuningConfig
from sparse_dataflow.core.layouts.layout import LayoutTables
from sparse_dataflow.core.ops.activation import times_derivative
from sparse_dataflow.core.ops.block_sparse_matmul import fused
from sparse_dataflow.core.ops.dispatch import Shaped

BLOCKS = (32, 64, 128, 256)
"""Legal block sides."""

DTYPES = ("bfloat16", "float32")
"""Legal dtypes of x and values."""


def block_sparse_matmul(
    x: jax.Array,
    values: jax.Array,
    tables: LayoutTables,
    *,
    bias: jax.Array | None = None,
    activation: str | None = None,
    tuning: TuningConfig | None = None,
) -> jax.Array:
    """Compute activation(x W + bias) in float32, rounded to x's dtype; differentiable.

    The arguments are those of `hopper.api.block_sparse_matmul`.
    """
    out_features = len(tables.in_index) * values.shape[1]
    lines = build_tile_tables(tables, values.shape[1])
    tuning = tuning or require_tuning(x, values, lines, activation is not None)
    options = fused.Options(activation, tuning, out_features)
    return fused_product(options, x, values, bias, lines)


def block_sparse_matmul_refusal(
    x: Shaped, values: Shaped, tables: LayoutTables, *, activated: bool = False
) -> str:
    """Return why the target TPU cannot run these operands; empty if it can."""
    block = values.shape[-1]
    if block not in BLOCKS:
        return f"block {block} does not fit the tiles; legal: {', '.join(map(str, BLOCKS))}."
    if x.dtype != values.dtype or x.dtype not in DTYPES:
        return f"x is {x.dtype} and values are {values.dtype}; legal: one of {', '.join(DTYPES)}."
    lines = build_tile_tables(tables, block)
    limit = sizes.device().smem_capacity_bytes * 7 // 8
    need = max(map(smem_bytes, lines))
    if need > limit:
        return f"the tables need {need} bytes of scalar memory; legal: up to {limit}."
    if len(x) and choose_tuning(x, values, lines, activated) is None:
        features = max(x.shape[-1], len(tables.in_index) * block)
        return f"no tile of {features} features fits VMEM; legal: narrower or sharded weights."
    return ""


def default_tuning(
    x: Shaped, values: Shaped, tables: LayoutTables, *, activated: bool = False
) -> TuningConfig | None:
    """Return the tile sizes for these shapes on the target TPU; None if no tile fits VMEM.

    `activated` says whether an activation is fused.
    """
    return choose_tuning(x, values, build_tile_tables(tables, values.shape[-1]), activated)


def _gradients(options, x, values, before, dy, lines):
    tuning, derived, dbias = options.tuning, dy, None
    # The kernel of dW reads dy anyway, so it also writes dz and its sum for the bias.
    if before is not None and tuning.fuse_derivative:
        dvalues, derived, dbias = stored_weight_gradient(
            tuning, x, dy, values, lines, activation=options.activation, preactivation=before
        )
    else:
        if before is not None:
            derived = times_derivative(options.activation, dy, before)
        (dvalues,) = stored_weight_gradient(tuning, x, derived, values, lines)
    # Without the columns that pad x to whole tiles.
    dx = _input_gradient(options, derived, values, lines)[:, : x.shape[1]]
    return dx, dvalues, derived, dbias


def _product(options, x, values, bias, lines, keep):
    inputs, outputs = padded_widths(lines, values)
    if bias is not None:
        bias = pad_to(bias.astype(jnp.float32)[None], outputs, rows=1)
    results = line_product(
        pad_to(x, inputs),
        values,
        lines[0],
        options.tuning.forward,
        transposed=False,
        bias=bias,
        activation=options.activation,
        with_preactivation=keep,
        **sizes.limits(options.tuning),
    )
    return [result[: len(x), : options.out_features] for result in results]


def _input_gradient(options, dy, values, lines):
    (dx,) = line_product(
        pad_to(dy, padded_widths(lines, values)[1]),
        values,
        lines[1],
        options.tuning.input_gradient,
        transposed=True,
        **sizes.limits(options.tuning),
    )
    return dx[: len(dy)]


def stored_weight_gradient(
    tuning: TuningConfig,
    x: jax.Array,
    dy: jax.Array,
    values: jax.Array,
    lines: WeightTables,
    *,
    activation: str | None = None,
    preactivation: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Compute dW at the stored blocks, with an activation's derivative if one is passed.

    Args:
      tuning: tile sizes.
      x: [tokens, in_features].
      dy: [tokens, out_features].
      values: [nnz, block, block]; only shape and dtype are read.
      lines: tile tables of the weight.
      activation: name of a fused one that follows the product; None for none.
      preactivation: [tokens, out_features], its input.

    Returns:
      (dW,), or with an activation (dW, dz = dy times its derivative, float32 sum of dz over tokens
      [1, out_features]).
    """
    inputs, outputs = padded_widths(lines, values)
    sides = pad_to(x, inputs), pad_to(dy, outputs)
    transposed = gathers_dy(lines, preactivation is not None)
    dvalues, *derived = line_gradient(
        *(sides[::-1] if transposed else sides),
        lines[1] if transposed else lines[0],
        tuning.weight_gradient,
        result=jax.ShapeDtypeStruct(values.shape, values.dtype),
        transposed=transposed,
        activation=activation,
        preactivation=None if preactivation is None else pad_to(preactivation, outputs),
        vmem_bytes=tuning.vmem_bytes,
    )
    if derived:
        derived = [derived[0][: len(dy), : dy.shape[1]], derived[1][:, : dy.shape[1]]]
    return dvalues, *derived


fused_product = fused.differentiable(_product, _gradients)
"""(options, x, values, bias, lines) -> y: `block_sparse_matmul` without its checks, given
the weight's tile tables."""
