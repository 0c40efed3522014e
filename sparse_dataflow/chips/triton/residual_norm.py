"""`core.ops.residual_norm` in Pallas kernels that jax lowers to Triton: NVIDIA GPUs.

A program has whole rows in registers, so the statistics need no pass of their own, and the backward
pass computes them again from the residual stream. Features are in chunks whose length is a power of
two, as Triton has no other tiles.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sparse_dataflow.chips import residual_norm as kernels
from sparse_dataflow.chips.triton import target
from sparse_dataflow.core.ops import derivatives
from sparse_dataflow.core.ops.residual_norm.residual_norm_op import Norm, Operands

CHUNK, NARROWEST, MOST_CHUNKS = 1024, 128, 16
"""Most and fewest features of a chunk, and most chunks of a row."""

PROGRAMS = 128
"""Most programs of the backward pass, about one for each multiprocessor: each writes the sums of
its rows, which are read once more."""

WARPS = 8


def residual_norm_refusal(norm: Norm, operands: Operands) -> str:
    """Return why the kernels cannot run these operands; empty if they can."""
    x = operands.x
    if reason := kernels.stream_refusal(x):
        return reason
    features, chunk = x.shape[-1], _chunk(x.shape[-1])
    if chunk < NARROWEST or features > MOST_CHUNKS * chunk:
        return (
            f"x has {features} features; legal: at most {MOST_CHUNKS} times the largest power of "
            f"two up to {CHUNK} that divides them, which is at least {NARROWEST}."
        )
    return target.gpu_refusal()


def run_residual_norm(norm: Norm, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Compute the op; see `residual_norm_op`."""
    x, y, *parameters = operands
    tiles = _tiles(norm, x.shape[-1])
    flat = [None if each is None else each.reshape(-1, *tiles) for each in (x, y)]
    tiled = [None if each is None else each.reshape(tiles) for each in parameters]
    residual, normed = _op((norm, y is None), tuple(flat), tuple(tiled))
    # The product that reads this splits it into the groups again, so XLA moves nothing.
    return residual.reshape(x.shape), normed.swapaxes(1, 2).reshape(x.shape)


def _chunk(features):
    return min(CHUNK, features & -features)


def _tiles(norm, features):
    """Returns the features as (chunks, groups, run): whole rounds of the groups that the reader of
    the result takes, if they are a power of two, else chunks of one part."""
    chunk = norm.groups * norm.run
    fits = chunk and NARROWEST <= chunk <= CHUNK and chunk & -chunk == chunk
    if fits and features % chunk == 0 and features <= MOST_CHUNKS * chunk:
        return features // chunk, norm.groups, norm.run
    return features // _chunk(features), 1, _chunk(features)


def _sum(tile):
    return jnp.sum(jnp.sum(tile, axis=1))


def _statistics(norm, row):
    """Returns (tiles less their mean, 1 / standard deviation) of a row in float32 tiles."""
    features = sum(tile.size for tile in row)
    if norm.centred:
        mean = sum(_sum(tile) for tile in row) / features
        row = [tile - mean for tile in row]
    variance = sum(_sum(tile * tile) for tile in row) / features
    return row, lax.rsqrt(variance + norm.epsilon)


def _wide(ref, *index):
    return ref[index].astype(jnp.float32)


@derivatives.batchable
def _kernel(norm, x, *arrays, names):
    """Computes (residual, normed) of x [rows, chunks, groups, run] and the other arrays by name.

    Normed is [rows, groups, chunks, run].
    """
    rows, chunks, groups, run = x.shape

    def residual_norm(*refs):
        named = dict(zip(("x", *names), refs))
        *residual, normed = refs[len(named) :]
        row = pl.program_id(0)
        values = []
        # Unrolled: all chunks of a row stay in registers for its statistics.
        for chunk in range(chunks):
            value = _wide(named["x"], row, chunk)
            if "y" in named:
                value += _wide(named["y"], row, chunk)
                if "bias" in named:
                    value += _wide(named["bias"], chunk)
                rounded = value.astype(x.dtype)
                residual[0][row, chunk] = rounded
                value = rounded.astype(jnp.float32)  # As the backward pass reads it.
            values.append(value)
        values, factor = _statistics(norm, values)
        for chunk, value in enumerate(values):
            result = value * factor * _wide(named["scale"], chunk)
            if "shift" in named:
                result += _wide(named["shift"], chunk)
            normed[row, :, chunk] = result.astype(normed.dtype)

    shapes = [jax.ShapeDtypeStruct((rows, groups, chunks, run), x.dtype)]
    if "y" in names:
        shapes.insert(0, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return pl.pallas_call(
        residual_norm,
        name="residual_norm",
        grid=(rows,),
        in_specs=[target.whole(array) for array in (x, *arrays)],
        out_specs=[target.whole(shape) for shape in shapes],
        out_shape=shapes,
        compiler_params=target.triton.CompilerParams(num_warps=WARPS, num_stages=1),
    )(x, *arrays)


@derivatives.batchable
def _gradients(norm, residual, scale, dresidual, dnormed, *, sums):
    """Returns dx and float32 [programs, chunks, groups, run] sums over rows: of the named ones of
    `sums`."""
    rows, *tiles = residual.shape
    chunks, features = tiles[0], residual[0].size
    # Each program adds up the rows of its own part, in registers.  The caller adds the few sums of
    # the programs; one sum for all would need atomic additions, whose order is not fixed.
    programs = next(n for n in range(min(PROGRAMS, rows), 0, -1) if rows % n == 0)
    each = rows // programs

    def residual_norm_gradient(residual, scale, dresidual, dnormed, dx, *totals):
        program = pl.program_id(0)

        def add(number, carried):
            row = program * each + number
            values, factor = _statistics(norm, [_wide(residual, row, c) for c in range(chunks)])
            values = [value * factor for value in values]
            outer = [_wide(dnormed, row, slice(None), c) for c in range(chunks)]
            inner = [dy * _wide(scale, c) for c, dy in enumerate(outer)]
            along = sum(_sum(a * b) for a, b in zip(inner, values)) / features
            mean = sum(_sum(a) for a in inner) / features if norm.centred else 0.0
            result = []
            for c in range(chunks):
                # The derivative of (x - mean) / deviation: what changes only the mean or the scale
                # of a row does not change its norm, and is taken out.
                gradient = factor * (inner[c] - mean - values[c] * along)
                gradient += _wide(dresidual, row, c)
                dx[row, c] = gradient.astype(dx.dtype)
                result.append({"scale": outer[c] * values[c], "shift": outer[c], "bias": gradient})
            return [
                [total + terms[name] for total, terms in zip(column_sums, result)]
                for name, column_sums in zip(sums, carried)
            ]

        zeros = [[jnp.zeros(tiles[1:], jnp.float32) for _ in range(chunks)] for _ in sums]
        for column_sums, total in zip(lax.fori_loop(0, each, add, zeros), totals):
            for c, value in enumerate(column_sums):
                total[program, c] = value

    shapes = [jax.ShapeDtypeStruct(residual.shape, residual.dtype)]
    shapes += [jax.ShapeDtypeStruct((programs, *tiles), jnp.float32)] * len(sums)
    operands = residual, scale, dresidual, dnormed
    return pl.pallas_call(
        residual_norm_gradient,
        name="residual_norm_gradient",
        grid=(programs,),
        in_specs=[target.whole(array) for array in operands],
        out_specs=[target.whole(shape) for shape in shapes],
        out_shape=shapes,
        compiler_params=target.triton.CompilerParams(num_warps=WARPS, num_stages=1),
    )(*operands)


_op = kernels.differentiable(_kernel, _gradients, lambda normed: normed.swapaxes(1, 2))
