"""`core.ops.bias_activation` in Pallas kernels that jax lowers to Triton: NVIDIA GPUs.

XLA computes a value that an activation and its derivative share once, writes it, and reads it in
both: two more passes over the widest array of a block. It sums the bias's gradient in another pass.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sparse_dataflow.chips.triton import target
from sparse_dataflow.core.config.activations import ACTIVATIONS
from sparse_dataflow.core.ops import derivatives, dispatch
from sparse_dataflow.core.ops.activation import value_and_derivative

COLUMNS, ROWS = 256, 16
"""Most columns and rows of a tile: 4,096 elements, 16 a thread."""

NARROWEST, PROGRAMS = 64, 32
"""Fewest columns of a tile, and most programs along the rows, each of which writes a sum."""

WARPS = 8


def bias_activation_refusal(x: jax.Array, bias: jax.Array, activation: str) -> str:
    """Return why the kernels cannot run these operands; empty if they can."""
    if not ACTIVATIONS[activation].fused:
        return f"kernels do not compute the activation {activation}."
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"x is {x.dtype}; legal: bfloat16, float32."
    if not all(isinstance(size, int) for size in x.shape):
        return "x has a symbolic dimension."
    rows, features = x.size // x.shape[-1], x.shape[-1]
    if rows % ROWS or features % NARROWEST:
        return f"x has {rows} x {features} elements; legal: multiples of {ROWS} x {NARROWEST}."
    return target.gpu_refusal()


def run_bias_activation(x: jax.Array, bias: jax.Array, activation: str) -> jax.Array:
    """Compute the op; see `bias_activation_op`."""
    x, bias = dispatch.equally_varying(x, bias)
    flat = x.reshape(-1, x.shape[-1])
    return _op(activation, flat, bias).reshape(x.shape)


def _programs(rows):
    """Returns the number of programs along the rows."""
    tiles = rows // ROWS
    return next(
        programs for programs in range(min(PROGRAMS, tiles), 0, -1) if tiles % programs == 0
    )


def _columns(features):
    """Returns the columns of a tile, a power of two."""
    return min(COLUMNS, features & -features)


@derivatives.batchable
def _value(activation, x, bias):
    """Computes activation(x + bias) of x [rows, features]."""
    columns = _columns(x.shape[-1])

    def bias_activation(x, bias, y):
        wide = x[...].astype(jnp.float32) + bias[...].astype(jnp.float32)[None]
        y[...] = value_and_derivative(activation, wide)[0].astype(y.dtype)

    # One pass over tiles that do not depend on each other; a bias serves a column of tiles.
    tile = pl.BlockSpec((ROWS, columns), lambda row, column: (row, column))
    return pl.pallas_call(
        bias_activation,
        grid=(len(x) // ROWS, x.shape[-1] // columns),
        in_specs=[tile, pl.BlockSpec((columns,), lambda row, column: (column,))],
        out_specs=tile,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=target.triton.CompilerParams(num_warps=WARPS, num_stages=1),
    )(x, bias)


@derivatives.batchable
def _gradients(activation, x, bias, dy):
    """Returns (dx, the sums of dx over the rows of each program)."""
    (rows, features), columns = x.shape, _columns(x.shape[-1])
    programs = _programs(rows)
    tiles = rows // ROWS // programs

    def bias_activation_gradient(x, bias, dy, dx, sums):
        program, first = pl.program_id(0), pl.program_id(1) * columns
        column_slice = pl.ds(first, columns)
        added = bias[column_slice].astype(jnp.float32)[None]

        def add(number, total):
            tile = pl.ds((program * tiles + number) * ROWS, ROWS), column_slice
            slope = value_and_derivative(activation, x[tile].astype(jnp.float32) + added)[1]
            gradient = dy[tile].astype(jnp.float32) * slope
            dx[tile] = gradient.astype(dx.dtype)
            return total + gradient

        # Tiles are added elementwise, and rows once at the end.  The sums of the programs are added
        # outside, in a fixed order, so that runs have equal bits.
        zeros = jnp.zeros((ROWS, columns), jnp.float32)
        sums[program, column_slice] = lax.fori_loop(0, tiles, add, zeros).sum(0)

    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((programs, features), jnp.float32),
    ]
    return pl.pallas_call(
        bias_activation_gradient,
        grid=(programs, features // columns),
        in_specs=[target.whole(array) for array in (x, bias, dy)],
        out_specs=[target.whole(shape) for shape in shapes],
        out_shape=shapes,
        compiler_params=target.triton.CompilerParams(num_warps=WARPS, num_stages=1),
    )(x, bias, dy)


def _backward(activation, saved, dy):
    x, bias = saved
    dx, sums = _gradients(activation, x, bias, dy)
    return dx, sums.sum(0).astype(bias.dtype)


def _form(activation, x, bias):
    """Computes the op without kernels, for forward mode."""
    wide = x.astype(jnp.float32) + bias.astype(jnp.float32)
    return value_and_derivative(activation, wide)[0].astype(x.dtype)


_op = derivatives.differentiable(_value, _backward, tangent=derivatives.tangent_of(_form))
