"""`core.ops.residual_norm` in Pallas kernels for TPUs.

A tile of rows is in VMEM whole, so the statistics need no pass of their own, and the backward pass
computes them again from the residual stream.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparse_dataflow.chips import residual_norm as kernels
from sparse_dataflow.core.ops import derivatives
from sparse_dataflow.core.ops.residual_norm.residual_norm_op import Norm, Operands

LANES = 128
TILES = (128, 64, 32, 16)
"""Rows of a tile: the most that divide the rows, and whose arrays take at most TILE_BYTES."""

TILE_BYTES = 10 * 2**20
"""Bytes in VMEM of a tile: four arrays, of which one is computed and one moves, and sums in float32
of four. The compilers' limit of a kernel is 16 MiB on TPUs up to v5p."""

CORES = 2
"""Parts of the backward pass: a chip with two cores runs both at once. Each has its own sums."""


def residual_norm_refusal(norm: Norm, operands: Operands) -> str:
    """Return why the kernels cannot run these operands; empty if they can."""
    x = operands.x
    if reason := kernels.stream_refusal(x):
        return reason
    features = x.shape[-1]
    if features % LANES:
        return f"x has {features} features; legal: multiples of {LANES}."
    rows = x.size // features
    if not _tile(rows, features, x.dtype):
        return (
            f"x has {rows:,} rows of {features:,} features; legal: multiples of {CORES * TILES[-1]}"
            f" rows, {TILES[-1]} of which take at most {TILE_BYTES:,} bytes of VMEM."
        )
    return ""


def run_residual_norm(norm: Norm, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Compute the op; see `residual_norm_op`."""
    x, y, *parameters = operands
    features = x.shape[-1]
    rows = tuple(None if each is None else each.reshape(-1, features) for each in (x, y))
    lines = tuple(None if each is None else each.reshape(1, features) for each in parameters)
    residual, normed = _op((norm, y is None), rows, lines)
    return residual.reshape(x.shape), normed.reshape(x.shape)


def _tile(rows, features, dtype):
    """Returns the rows of a tile; 0 if none fits."""
    row = features * (4 * 2 * jnp.dtype(dtype).itemsize + 4 * 4)
    fits = (n for n in TILES if n * row <= TILE_BYTES and rows % (CORES * n) == 0)
    return next(fits, 0)


def _statistics(norm, tile):
    """Returns (tile less its mean, 1 / standard deviation) of each row of a float32 tile."""
    if norm.centred:
        tile = tile - tile.mean(-1, keepdims=True)
    return tile, lax.rsqrt((tile * tile).mean(-1, keepdims=True) + norm.epsilon)


def _cost(operations, x, arrays):
    """Returns what XLA schedules by: operations of each number of x, and bytes of all arrays."""
    moved = sum(array.size * array.dtype.itemsize for array in arrays)
    return pl.CostEstimate(operations * x.size, transcendentals=len(x), bytes_accessed=moved)


def _wide(ref):
    return ref[...].astype(jnp.float32)


@derivatives.batchable
def _kernel(norm, x, *arrays, names):
    """Computes (residual, normed) of x [rows, features] and the other arrays by name."""
    rows, features = x.shape
    tile = _tile(rows, features, x.dtype)

    def residual_norm(*refs):
        named = dict(zip(("x", *names), refs))
        *residual, normed = refs[len(named) :]
        value = _wide(named["x"])
        if "y" in named:
            value += _wide(named["y"])
            if "bias" in named:
                value += _wide(named["bias"])
            rounded = value.astype(x.dtype)
            residual[0][...] = rounded
            value = rounded.astype(jnp.float32)  # As the backward pass reads it.
        value, factor = _statistics(norm, value)
        result = value * factor * _wide(named["scale"])
        if "shift" in named:
            result += _wide(named["shift"])
        normed[...] = result.astype(normed.dtype)

    by_tile = pl.BlockSpec((tile, features), lambda i: (i, 0))
    line = pl.BlockSpec((1, features), lambda i: (0, 0))
    outputs = 2 if "y" in names else 1
    return pl.pallas_call(
        residual_norm,
        name="residual_norm",
        grid=(rows // tile,),
        in_specs=[by_tile if len(array) == rows else line for array in (x, *arrays)],
        out_specs=[by_tile] * outputs,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * outputs,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=_cost(8, x, (x, *arrays, *[x] * outputs)),
    )(x, *arrays)


@derivatives.batchable
def _gradients(norm, residual, scale, dresidual, dnormed, *, sums):
    """Returns dx and float32 [CORES, 1, features] sums over rows: of the named ones of `sums`."""
    rows, features = residual.shape
    tile = _tile(rows, features, residual.dtype)
    steps = rows // tile // CORES

    def residual_norm_gradient(residual, scale, dresidual, dnormed, dx, *totals):
        values, factor = _statistics(norm, _wide(residual))
        values *= factor
        outer = _wide(dnormed)
        inner = outer * _wide(scale)
        # With n = x / rms and g its gradient, dx = (g - n mean(g n)) / rms, less mean(g) / rms
        # where the mean was subtracted.
        gradient = inner - values * (inner * values).mean(-1, keepdims=True)
        if norm.centred:
            gradient -= inner.mean(-1, keepdims=True)
        gradient = factor * gradient + _wide(dresidual)
        dx[...] = gradient.astype(dx.dtype)
        # The bias was added to the stream, so its gradient is that of the stream.
        terms = {"scale": outer * values, "shift": outer, "bias": gradient}

        @pl.when(pl.program_id(1) == 0)
        def _():
            for total in totals:
                total[...] = jnp.zeros_like(total)

        for name, total in zip(sums, totals):
            total[0] += terms[name].sum(0, keepdims=True)

    # Each core has a run of tiles, and sums of its own that stay in VMEM over them: their index map
    # ignores `i`.  The caller adds the sums of the cores.
    by_tile = pl.BlockSpec((tile, features), lambda core, i: (core * steps + i, 0))
    line = pl.BlockSpec((1, features), lambda core, i: (0, 0))
    total = pl.BlockSpec((1, 1, features), lambda core, i: (core, 0, 0))
    shapes = [jax.ShapeDtypeStruct(residual.shape, residual.dtype)]
    shapes += [jax.ShapeDtypeStruct((CORES, 1, features), jnp.float32)] * len(sums)
    return pl.pallas_call(
        residual_norm_gradient,
        name="residual_norm_gradient",
        grid=(CORES, steps),
        in_specs=[by_tile, line, by_tile, by_tile],
        out_specs=[by_tile, *[total] * len(sums)],
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(16, residual, (residual, scale, dresidual, dnormed, *shapes)),
    )(residual, scale, dresidual, dnormed)


_op = kernels.differentiable(_kernel, _gradients)
