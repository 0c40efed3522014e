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
import functools

import jax
import jax.numpy as jnp

from sparse_dataflow.errors import UserError
from sparse_dataflow.kernels.block_sparse_matmul import tuning as sizes
from sparse_dataflow.kernels.block_sparse_matmul.pallas_tpu_gradient import line_gradient
from sparse_dataflow.kernels.block_sparse_matmul.pallas_tpu_products import line_product
from sparse_dataflow.kernels.block_sparse_matmul.pallas_tpu_tables import (
    smem_bytes,
    tile_tables,
)
from sparse_dataflow.kernels.block_sparse_matmul.tuning import Operand, TuningConfig
from sparse_dataflow.kernels.gelu.api import value_and_derivative
from sparse_dataflow.sparsity.layout import LayoutTables

BLOCKS = (32, 64, 128, 256)
"""Legal blocks."""

DTYPES = ("bfloat16", "float32")
"""Legal dtypes of x and values."""


@dataclasses.dataclass(frozen=True)
class _Options:
    """What is fixed when the op is traced."""

    out_features: int
    gelu: bool
    keep_preactivation: bool
    tuning: TuningConfig
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
      UserError: if `supported` has a reason against it, or the activation is unknown.
    """
    if reason := supported(x, values, tables, activated=activation is not None):
        raise UserError(f"block_sparse_matmul on TPU: {reason}")
    if activation not in (None, "gelu"):
        raise UserError(f"activation {activation!r} is unknown; legal: gelu, or None.")
    out_features = len(tables.in_index) * values.shape[1]
    if len(x) == 0:
        empty = jnp.zeros((0, out_features), x.dtype)
        return empty if residual is None else empty + residual
    lines = _both(tables, values.shape[1])
    tuning = tuning or _tuning(x, values, lines, activation is not None)
    options = _Options(out_features, activation is not None, keep_preactivation, tuning, interpret)
    return _matmul(options, x, values, bias, residual, *lines)


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
      UserError: if `supported` has a reason against it, or the accumulator is not float32.
    """
    values = jax.ShapeDtypeStruct(accumulator.shape, x.dtype)
    if reason := supported(x, values, tables):
        raise UserError(f"weight_gradient on TPU: {reason}")
    if accumulator.dtype != jnp.float32:
        raise UserError(f"The accumulator is {accumulator.dtype}; legal: float32.")
    if len(x) == 0:
        return accumulator
    lines = _both(tables, accumulator.shape[1])
    tuning = tuning or _tuning(x, values, lines, False)
    options = _Options(dy.shape[1], False, False, tuning, interpret)
    return _weight_gradient(options, x, dy, accumulator, *lines, accumulator=accumulator)[0]


def supported(
    x: jax.Array, values: jax.Array, tables: LayoutTables, *, activated: bool = False
) -> str | None:
    """Why these operands cannot run on the TPU compiled for, in words; None where they can."""
    block = values.shape[-1]
    if block not in BLOCKS:
        return f"block {block} does not fit the tiles; legal: {', '.join(map(str, BLOCKS))}."
    if x.dtype != values.dtype or x.dtype not in DTYPES:
        return f"x is {x.dtype} and values are {values.dtype}; legal: one of {', '.join(DTYPES)}."
    lines = _both(tables, block)
    most = sizes.device().smem_capacity_bytes * 7 // 8
    need = max(map(smem_bytes, lines))
    if need > most:
        return f"its tables need {need} bytes of scalar memory; legal: up to {most}."
    if len(x) and _tuning(x, values, lines, activated) is None:
        features = max(x.shape[-1], len(tables.in_index) * block)
        return f"no tile of its {features} features fits VMEM; legal: narrower or sharded weights."
    return None


def default_tuning(
    x: jax.Array, values: jax.Array, tables: LayoutTables, *, activated: bool = False
) -> TuningConfig | None:
    """Tile sizes for these shapes on the TPU compiled for; None where its VMEM holds none.

    Args:
      x: [tokens, in_features]; only shapes and dtypes are read.
      values: [nnz, block, block].
      tables: layout tables, concrete or traced.
      activated: whether the GELU is fused.
    """
    return _tuning(x, values, _both(tables, values.shape[-1]), activated)


def _tuning(x, values, lines, activated):
    info, budget = sizes.device(), sizes.budget()
    by_column, by_row = lines
    forward = _operand(x, values, by_column, len(by_row.count))
    backward = _operand(x, values, by_row, len(by_column.count))
    products = sizes.product_tiles(forward, 3, budget), sizes.product_tiles(backward, 1, budget)
    for fuse in (True, False):
        activated = activated and fuse
        gradient = backward if _by_row(by_column, by_row, activated) else forward
        gradient = sizes.gradient_tiles(gradient, activated, budget, info.num_cores)
        if None not in (*products, gradient):
            return TuningConfig(
                *products, gradient, info.vmem_capacity_bytes, info.num_cores, fuse_derivative=fuse
            )
    return None


def _operand(x, values, lines, others):
    block = values.shape[-1]
    return Operand(
        tokens=len(x),
        features=others * max(block, sizes.LANES),
        lines=len(lines.count),
        entries=lines.index.shape[1],
        block=block,
        itemsize=x.dtype.itemsize,
    )


def _both(tables, block):
    """Tile tables by output column and by input row."""
    ratio = max(1, sizes.LANES // block)
    in_blocks, out_blocks = len(tables.out_index), len(tables.in_index)
    by_column = tile_tables(tables.in_index, tables.in_slot, in_blocks, ratio)
    return by_column, tile_tables(tables.out_index, tables.out_slot, out_blocks, ratio)


def _by_row(by_column, by_row, activated):
    """Whether dW gathers from dy: where it is narrower, unless the one pass over dy is needed."""
    return not activated and len(by_column.count) < len(by_row.count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(options, x, values, bias, residual, by_column, by_row):
    return _product(options, x, values, bias, residual, by_column, by_row, keep=False)[0]


def _forward(options, x, values, bias, residual, by_column, by_row):
    keep = options.gelu and options.keep_preactivation
    y, *kept = _product(options, x, values, bias, residual, by_column, by_row, keep=keep)
    # The residual's gradient is dy; of the array itself only the presence is known again.
    return y, (x, values, bias, residual is not None, kept, by_column, by_row)


def _backward(options, saved, dy):
    x, values, bias, has_residual, kept, by_column, by_row = saved
    tokens_gradient, dbias = dy, None
    lines = (by_column, by_row)
    if options.gelu:
        linear = dataclasses.replace(options, gelu=False)
        before = kept or _product(linear, x, values, bias, None, *lines, keep=False)
    if options.gelu and options.tuning.fuse_derivative:
        dvalues, tokens_gradient, dbias = _weight_gradient(
            options, x, dy, values, *lines, preactivation=before[0]
        )
    else:
        if options.gelu:
            slope = value_and_derivative(before[0].astype(jnp.float32))[1]
            tokens_gradient = (dy.astype(jnp.float32) * slope).astype(dy.dtype)
        dvalues = _weight_gradient(options, x, tokens_gradient, values, *lines)[0]
    dx = _input_gradient(options, tokens_gradient, values, *lines)[:, : x.shape[1]]
    if bias is None:
        dbias = None
    elif dbias is None:
        dbias = jnp.sum(tokens_gradient, axis=0, dtype=jnp.float32)
    dbias = None if dbias is None else dbias.reshape(bias.shape).astype(bias.dtype)
    return dx, dvalues, dbias, dy if has_residual else None, None, None


_matmul.defvjp(_forward, _backward)


def _product(options, x, values, bias, residual, by_column, by_row, keep):
    tile = _tile(values)
    wide = len(by_column.count) * tile
    if bias is not None:
        bias = _pad(bias.astype(jnp.float32)[None], 1, wide)
    rows = sizes.sublanes(x.dtype.itemsize)
    results = line_product(
        _pad(x, rows, len(by_row.count) * tile),
        values,
        by_column,
        options.tuning.forward,
        transposed=False,
        bias=bias,
        gelu=options.gelu,
        residual=None if residual is None else _pad(residual, rows, wide),
        keep=keep,
        vmem_bytes=options.tuning.vmem_bytes,
        cores=options.tuning.cores,
        interpret=options.interpret,
    )
    return [result[: len(x), : options.out_features] for result in results]


def _input_gradient(options, dy, values, by_column, by_row):
    tile = _tile(values)
    rows = sizes.sublanes(dy.dtype.itemsize)
    (dx,) = line_product(
        _pad(dy, rows, len(by_column.count) * tile),
        values,
        by_row,
        options.tuning.input_gradient,
        transposed=True,
        vmem_bytes=options.tuning.vmem_bytes,
        cores=options.tuning.cores,
        interpret=options.interpret,
    )
    return dx[: len(dy)]


def _weight_gradient(
    options, x, dy, values, by_column, by_row, preactivation=None, accumulator=None
):
    tile = _tile(values)
    rows = sizes.sublanes(x.dtype.itemsize)
    width = len(by_column.count) * tile
    sides = _pad(x, rows, len(by_row.count) * tile), _pad(dy, rows, width)
    transposed = _by_row(by_column, by_row, preactivation is not None)
    dvalues, *derived = line_gradient(
        *(sides[::-1] if transposed else sides),
        by_row if transposed else by_column,
        options.tuning.weight_gradient,
        result=jax.ShapeDtypeStruct(values.shape, values.dtype),
        transposed=transposed,
        preactivation=None if preactivation is None else _pad(preactivation, rows, width),
        accumulator=accumulator,
        vmem_bytes=options.tuning.vmem_bytes,
        interpret=options.interpret,
    )
    if derived:
        features = dy.shape[1]
        derived = [derived[0][: len(dy), :features], derived[1][:, :features]]
    return dvalues, *derived


def _tile(values):
    return max(values.shape[-1], sizes.LANES)


def _pad(array, rows, columns):
    """Rows up to a multiple of `rows`, columns up to `columns`, with zeros; itself where even."""
    extra = (-len(array) % rows, columns - array.shape[1])
    return array if extra == (0, 0) else jnp.pad(array, [(0, e) for e in extra])
