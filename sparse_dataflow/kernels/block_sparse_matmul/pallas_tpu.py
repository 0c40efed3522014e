"""The block-sparse matmul in Mosaic kernels for TPUs; all three products, fused with what follows.

Tables are data (scalar prefetch), so a changed layout runs in the same program, and only stored
blocks are ever read or written.  Blocks of 128 and 256 are tiles of the matrix unit as they are.
Small blocks cost more, in three places: HBM pads their rows to 128 lanes (block 64 takes twice,
block 32 four times its bytes); a tile of 128 is multiplied whole however few of its blocks are
stored (see `pallas_tpu_tables`); and each tile is put together in VMEM once a token tile, about
as much work as 64 (block 64) or 200 (block 32) tokens.  Chips with 256-wide matrix units (v6e)
run a result column of 128 at half rate; block 256 does not.

Copies outside the kernels are made only where a width is no multiple of the tile, or tokens none
of 16 (32-bit: 8): then the operands are padded.
"""

import dataclasses

import jax
import jax.numpy as jnp

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels.block_sparse_matmul import fused
from sparse_dataflow.kernels.block_sparse_matmul import tuning as sizes
from sparse_dataflow.kernels.block_sparse_matmul.pallas_tpu_gradient import line_gradient
from sparse_dataflow.kernels.block_sparse_matmul.pallas_tpu_products import line_product
from sparse_dataflow.kernels.block_sparse_matmul.pallas_tpu_shapes import (
    Lines,
    gathers_from_dy,
    lines_of,
    needed_tuning,
    pad_to,
    spaces_of,
    tile_of,
    tuning_of,
)
from sparse_dataflow.kernels.block_sparse_matmul.pallas_tpu_tables import smem_bytes
from sparse_dataflow.kernels.block_sparse_matmul.tuning import TuningConfig
from sparse_dataflow.kernels.dispatch import Shaped
from sparse_dataflow.kernels.gelu.api import through_gelu
from sparse_dataflow.kernels.tuned import Case, Space
from sparse_dataflow.sparsity.layout import LayoutTables

BLOCKS = (32, 64, 128, 256)
"""Legal blocks."""

DTYPES = ("bfloat16", "float32")
"""Legal dtypes of x and values."""


@dataclasses.dataclass(frozen=True)
class Options(fused.Options):
    """What is fixed when the op is traced.

    Attributes:
      out_features: width of y.
      interpret: as in `pl.pallas_call`.
    """

    out_features: int
    interpret: object


def block_sparse_matmul(
    x: jax.Array,
    values: jax.Array,
    tables: LayoutTables,
    *,
    bias: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    keep_preactivation: bool = True,
    tuning: TuningConfig | None = None,
    interpret=False,
) -> jax.Array:
    """activation(x W + bias) + residual, differentiable in x, values, bias and residual.

    Args:
      x: bfloat16 or float32 [tokens, in_features].
      values: [nnz, block, block] in x's dtype, as `BlockLayout` orders them.
      tables: `BlockLayout.tables()`, concrete or traced.
      bias: [out_features], any float dtype.
      activation: None or "gelu" (tanh form, `kernels.gelu`).
      residual: [tokens, out_features] in x's dtype.
      keep_preactivation: whether the backward pass finds the activation's input, or makes it
        again by another product; without an activation nothing is kept.
      tuning: tile sizes; None for `default_tuning`.
      interpret: as in `pl.pallas_call`; `pltpu.InterpretParams()` runs on a CPU.

    Returns:
      [tokens, out_features] in x's dtype; sums, bias, activation and residual in float32.

    Raises:
      UserError: if there is a `refusal`, shapes disagree, or the activation is
        unknown.
    """
    if reason := refusal(x, values, tables, activated=activation is not None):
        raise UserError(f"block_sparse_matmul on TPU: {reason}")
    if activation not in (None, "gelu"):
        raise UserError(f"activation {activation!r} is unknown; legal: gelu, or None.")
    out_features = len(tables.in_index) * values.shape[1]
    _check_shape("x", x, (len(x), len(tables.out_index) * values.shape[1]))
    _check_shape("bias", bias, (out_features,))
    _check_shape("residual", residual, (len(x), out_features))
    if len(x) == 0:
        empty = jnp.zeros((0, out_features), x.dtype)
        return empty if residual is None else empty + residual
    lines = lines_of(tables, values.shape[1])
    tuning = tuning or needed_tuning(x, values, lines, activation is not None)
    options = Options(activation is not None, keep_preactivation, tuning, out_features, interpret)
    return product_of_lines(options, x, values, bias, residual, lines)


def weight_gradient(
    x: jax.Array,
    dy: jax.Array,
    tables: LayoutTables,
    *,
    accumulator: jax.Array,
    tuning: TuningConfig | None = None,
    interpret=False,
) -> jax.Array:
    """accumulator + xᵀ dy at the stored blocks, in the accumulator's own buffer where jit owns it.

    Args:
      x: bfloat16 or float32 [tokens, in_features].
      dy: [tokens, out_features] in x's dtype.
      tables: `BlockLayout.tables()`.
      accumulator: float32 [nnz, block, block], the sum over earlier micro-batches.
      tuning: tile sizes; None for `default_tuning`.
      interpret: as in `pl.pallas_call`.

    Raises:
      UserError: if there is a `refusal`, shapes disagree, or the accumulator is not
        float32.
    """
    values = jax.ShapeDtypeStruct(accumulator.shape, x.dtype)
    if reason := refusal(x, values, tables):
        raise UserError(f"weight_gradient on TPU: {reason}")
    if accumulator.dtype != jnp.float32:
        raise UserError(f"The accumulator is {accumulator.dtype}; legal: float32.")
    _check_shape("x", x, (len(x), len(tables.out_index) * accumulator.shape[1]))
    _check_shape("dy", dy, (len(x), len(tables.in_index) * accumulator.shape[1]))
    if dy.dtype != x.dtype:
        raise UserError(f"dy is {dy.dtype}; legal: {x.dtype}, as x is.")
    if len(x) == 0:
        return accumulator
    lines = lines_of(tables, accumulator.shape[1])
    tuning = tuning or needed_tuning(x, values, lines, False)
    return gradient_of_lines(
        tuning, x, dy, accumulator, lines, accumulator=accumulator, interpret=interpret
    )[0]


def _check_shape(name, array, legal):
    if array is not None and array.shape != legal:
        raise UserError(f"{name} has shape {array.shape}; legal: {legal}.")


def refusal(x: Shaped, values: Shaped, tables: LayoutTables, *, activated: bool = False) -> str:
    """Why these operands cannot run on the TPU compiled for, in words; empty where they can."""
    block = values.shape[-1]
    if x.ndim != 2 or values.shape != (len(values), block, block):
        legal = "[tokens, in_features] and [nnz, block, block]"
        return f"x has shape {x.shape} and values have {values.shape}; legal: {legal}."
    if block not in BLOCKS:
        return f"block {block} does not fit the tiles; legal: {', '.join(map(str, BLOCKS))}."
    if x.dtype != values.dtype or x.dtype not in DTYPES:
        return f"x is {x.dtype} and values are {values.dtype}; legal: one of {', '.join(DTYPES)}."
    lines = lines_of(tables, block)
    most = sizes.device().smem_capacity_bytes * 7 // 8
    need = max(map(smem_bytes, lines))
    if need > most:
        return f"its tables need {need} bytes of scalar memory; legal: up to {most}."
    if len(x) and tuning_of(x, values, lines, activated) is None:
        features = max(x.shape[-1], len(tables.in_index) * block)
        return f"no tile of its {features} features fits VMEM; legal: narrower or sharded weights."
    return ""


def default_tuning(
    x: Shaped, values: Shaped, tables: LayoutTables, *, activated: bool = False
) -> TuningConfig | None:
    """Tile sizes for these shapes on the TPU compiled for; None where its VMEM holds none.

    Args:
      x: [tokens, in_features]; only shapes and dtypes are read.
      values: [nnz, block, block].
      tables: layout tables, concrete or traced.
      activated: whether the GELU is fused.
    """
    return tuning_of(x, values, lines_of(tables, values.shape[-1]), activated)


def spaces(x: Shaped, values: Shaped, tables: LayoutTables) -> dict[Case, Space] | None:
    """What an autotuner may try for each product; None where VMEM holds nothing of one."""
    return spaces_of(x, values, lines_of(tables, values.shape[-1]), False)


def _gradients(options, x, values, before, dy, lines):
    tuning, interpret = options.tuning, options.interpret
    derived, dbias = dy, None
    if before is not None and tuning.fuse_derivative:
        dvalues, derived, dbias = gradient_of_lines(
            tuning, x, dy, values, lines, preactivation=before, interpret=interpret
        )
    else:
        if before is not None:
            derived = through_gelu(dy, before)
        (dvalues,) = gradient_of_lines(tuning, x, derived, values, lines, interpret=interpret)
    dx = _input_gradient(options, derived, values, lines)[:, : x.shape[1]]
    return dx, dvalues, derived, dbias


def _product(options, x, values, bias, residual, lines, keep):
    by_column, by_row = lines
    wide = len(by_column.count) * tile_of(values)
    if bias is not None:
        bias = pad_to(bias.astype(jnp.float32)[None], wide, rows=1)
    results = line_product(
        pad_to(x, len(by_row.count) * tile_of(values)),
        values,
        by_column,
        options.tuning.forward,
        transposed=False,
        bias=bias,
        gelu=options.gelu,
        residual=None if residual is None else pad_to(residual, wide),
        keep=keep,
        vmem_bytes=options.tuning.vmem_bytes,
        cores=options.tuning.cores,
        interpret=options.interpret,
    )
    return [result[: len(x), : options.out_features] for result in results]


def _input_gradient(options, dy, values, lines):
    by_column, by_row = lines
    (dx,) = line_product(
        pad_to(dy, len(by_column.count) * tile_of(values)),
        values,
        by_row,
        options.tuning.input_gradient,
        transposed=True,
        vmem_bytes=options.tuning.vmem_bytes,
        cores=options.tuning.cores,
        interpret=options.interpret,
    )
    return dx[: len(dy)]


def gradient_of_lines(
    tuning: TuningConfig,
    x: jax.Array,
    dy: jax.Array,
    values: jax.Array,
    lines: Lines,
    *,
    preactivation: jax.Array | None = None,
    accumulator: jax.Array | None = None,
    interpret=False,
) -> tuple[jax.Array, ...]:
    """dW at the stored blocks.

    Args:
      tuning: tile sizes.
      x: [tokens, in_features].
      dy: [tokens, out_features].
      values: [nnz, block, block]; only shape and dtype are read.
      lines: the weight's.
      preactivation: [tokens, out_features] where a GELU came after the product.
      accumulator: float32 of values' shape that dW is added to.
      interpret: as in `pl.pallas_call`.

    Returns:
      (dW,), and with `preactivation` (dW, dy times the GELU's derivative, its sum over tokens
      [1, out_features] in float32).
    """
    by_column, by_row = lines
    tile, features = tile_of(values), dy.shape[1]
    width = len(by_column.count) * tile
    sides = pad_to(x, len(by_row.count) * tile), pad_to(dy, width)
    transposed = gathers_from_dy(lines, preactivation is not None)
    dvalues, *derived = line_gradient(
        *(sides[::-1] if transposed else sides),
        by_row if transposed else by_column,
        tuning.weight_gradient,
        result=jax.ShapeDtypeStruct(values.shape, values.dtype),
        transposed=transposed,
        preactivation=None if preactivation is None else pad_to(preactivation, width),
        accumulator=accumulator,
        vmem_bytes=tuning.vmem_bytes,
        interpret=interpret,
    )
    if derived:
        derived = [derived[0][: len(dy), :features], derived[1][:, :features]]
    return dvalues, *derived


product_of_lines = fused.differentiable(_product, _gradients)
"""(options, x, values, bias, residual, lines) -> y, as `block_sparse_matmul`, of operands without a
`refusal`, with the weight's tile tables."""
