"""The sparse MLP on a TPU: fused kernels where they save HBM traffic, else two products.

The fused forward pass saves no hidden activations; the backward pass recomputes them from x.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from sparse_dataflow.chips.tpu import mlp_kernels as kernels
from sparse_dataflow.chips.tpu.matmul import api as products
from sparse_dataflow.chips.tpu.matmul import tuning as sizes
from sparse_dataflow.chips.tpu.matmul.shapes import (
    build_tile_tables,
    pad_to,
    padded_widths,
    product_operand,
    require_tuning,
    tile_side,
)
from sparse_dataflow.chips.tpu.matmul.tables import smem_bytes
from sparse_dataflow.chips.tpu.mlp_tuning import MlpShape, MlpTuning, fused_tuning
from sparse_dataflow.core.ops import derivatives
from sparse_dataflow.core.ops.block_sparse_matmul import fused
from sparse_dataflow.core.ops.sparse_mlp.mlp_op import Operands


@dataclasses.dataclass(frozen=True)
class _Options:
    """Static options of the op."""

    tuning: MlpTuning
    out_features: int
    activation: str


def run_sparse_mlp(mlp: Operands, *, tuning: MlpTuning | None = None) -> jax.Array:
    """Compute the MLP of bfloat16 or float32; sums, bias and activation in float32."""
    tuning = tuning or default_tuning(mlp)
    out_features = len(mlp.tables_out.in_index) * mlp.values_out.shape[1]
    options = _Options(tuning, out_features, mlp.activation)
    # Two products save the pre-activation themselves.
    run = _pair if tuning.forward is None else _mlp
    return run(options, *mlp[:4], *_lines(mlp))


def sparse_mlp_refusal(mlp: Operands) -> str:
    """Return why the target TPU cannot run these operands; empty if it can."""
    return (
        mlp.plain_refusal()
        or products.block_sparse_matmul_refusal(mlp.x, mlp.values_in, mlp.tables_in, activated=True)
        or products.block_sparse_matmul_refusal(mlp.x, mlp.values_out, mlp.tables_out)
    )


def default_tuning(mlp: Operands) -> MlpTuning:
    """Return the tile sizes on the target TPU, and which passes are fused.

    Raises:
      UserError: if no tile of a single product fits VMEM.
    """
    x, values_in, _, values_out, *_ = mlp
    lines_in, lines_out = _lines(mlp)
    unfused = MlpTuning(
        forward=None,
        backward=None,
        product_in=require_tuning(x, values_in, lines_in, True),
        product_out=require_tuning(x, values_out, lines_out, False),
        gradient_in=require_tuning(x, values_in, lines_in, False).weight_gradient,
    )
    shape = _shape(x, values_in, values_out, lines_in, lines_out)
    return unfused if shape is None else fused_tuning(unfused, shape, sizes.budget())


def _lines(mlp):
    return (
        build_tile_tables(mlp.tables_in, mlp.values_in.shape[1]),
        build_tile_tables(mlp.tables_out, mlp.values_out.shape[1]),
    )


def _shape(x, values_in, values_out, lines_in, lines_out):
    """Return the MLP's shape; None if its kernels cannot be fused."""
    limit = sizes.device().smem_capacity_bytes * 7 // 8
    same_tile = tile_side(values_in) == tile_side(values_out)
    if not same_tile or sum(map(smem_bytes, (*lines_in, *lines_out))) > limit:
        return None
    return MlpShape(
        by_hidden=product_operand(x, values_in, lines_in, False),
        by_result=product_operand(x, values_out, lines_out, False),
        by_hidden_row=product_operand(x, values_out, lines_out, True),
        by_input_row=product_operand(x, values_in, lines_in, True),
        bytes_in=_stored_bytes(values_in),
        bytes_out=_stored_bytes(values_out),
    )


def _stored_bytes(values):
    return values.shape[0] * values.shape[1] * tile_side(values) * values.dtype.itemsize


@derivatives.batchable
def _value(options, x, values_in, bias_in, values_out, lines_in, lines_out):
    y = kernels.forward(
        pad_to(x, padded_widths(lines_in, values_in)[0]),
        values_in,
        _bias(bias_in, lines_in, values_in),
        values_out,
        lines_in[0],
        lines_out[0],
        options.tuning.forward,
        activation=options.activation,
        **sizes.limits(options.tuning.product_in),
    )
    return y[: len(x), : options.out_features]


def _backward(options, saved, dy):
    return *_gradients(options, *saved, dy), None, None


@derivatives.batchable
def _gradients(options, x, values_in, bias_in, values_out, lines_in, lines_out, dy):
    tuning = options.tuning
    if tuning.backward is None:
        # Only the operands were saved, so the first product is computed again, with what its own
        # gradient needs.
        pair = functools.partial(_pair, options, lines_in=lines_in, lines_out=lines_out)
        return jax.vjp(pair, x, values_in, bias_in, values_out)[1](dy)
    # Padding rows of dy are zero, so the hidden layer's padding rows add nothing to dW.
    wide_x = pad_to(x, padded_widths(lines_in, values_in)[0])
    wide_dy = pad_to(dy, padded_widths(lines_out, values_out)[1])
    dx, hidden, derived, dbias = kernels.backward(
        wide_x,
        wide_dy,
        values_in,
        _bias(bias_in, lines_in, values_in),
        values_out,
        lines_in,
        lines_out[1],
        tuning.backward,
        activation=options.activation,
        **sizes.limits(options.tuning.product_in),
    )
    gradient = products.stored_weight_gradient
    tiles_in = dataclasses.replace(tuning.product_in, weight_gradient=tuning.gradient_in)
    (dvalues_in,) = gradient(tiles_in, wide_x, derived, values_in, lines_in)
    (dvalues_out,) = gradient(tuning.product_out, hidden, wide_dy, values_out, lines_out)
    dbias = dbias[0, : len(bias_in)].astype(bias_in.dtype)
    return dx[: len(x), : x.shape[1]], dvalues_in, dbias, dvalues_out


def _pair(options, x, values_in, bias_in, values_out, lines_in, lines_out):
    """Compute the MLP as two products, the first with bias and activation in its epilogue."""
    tuning = options.tuning
    first = fused.Options(options.activation, tuning.product_in, len(bias_in))
    second = fused.Options(None, tuning.product_out, options.out_features)
    hidden = products.fused_product(first, x, values_in, bias_in, lines_in)
    return products.fused_product(second, hidden, values_out, None, lines_out)


_mlp = derivatives.differentiable(_value, _backward, tangent=derivatives.tangent_of(_pair))


def _bias(bias, lines, values):
    return pad_to(bias.astype(jnp.float32)[None], padded_widths(lines, values)[1], rows=1)
