"""`core.ops.residual_norm` in Pallas kernels that jax lowers to Triton: NVIDIA GPUs.

A program has whole rows in registers, so the statistics need no pass of their own, and the backward
pass computes them again from the residual stream. Features are in chunks whose length is a power of
two, as Triton has no other tiles.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sparse_dataflow.chips.triton import target
from sparse_dataflow.core.ops import derivatives
from sparse_dataflow.core.ops.residual_norm import residual_norm_op
from sparse_dataflow.core.ops.residual_norm.residual_norm_op import Norm, Operands

CHUNK, NARROWEST, MOST_CHUNKS = 1024, 128, 16
"""Most and fewest features of a chunk, and most chunks of a row."""

PROGRAMS = 128
"""Most programs of the backward pass, about one for each multiprocessor: each writes the sums of
its rows, which are read once more."""

WARPS = 8


def refusal(norm: Norm, operands: Operands) -> str:
    """Return why the kernels cannot run these operands; empty if they can."""
    x = operands.x
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"x is {x.dtype}; legal: bfloat16, float32."
    if not all(isinstance(size, int) for size in x.shape) or not x.size:
        return "x has a symbolic dimension, or no elements."
    features, chunk = x.shape[-1], _chunk(x.shape[-1])
    if chunk < NARROWEST or features > MOST_CHUNKS * chunk:
        return (
            f"x has {features} features; legal: at most {MOST_CHUNKS} times the largest power of "
            f"two up to {CHUNK} that divides them, which is at least {NARROWEST}."
        )
    return target.refusal()


def run(norm: Norm, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Compute the op; see `residual_norm_op`."""
    x, y, *parameters = operands
    flat = [None if each is None else each.reshape(-1, x.shape[-1]) for each in (x, y)]
    residual, normed = _op((norm, y is None), tuple(flat), tuple(parameters))
    return residual.reshape(x.shape), normed.reshape(x.shape)


def _chunk(features):
    return min(CHUNK, features & -features)


def _chunks(features):
    """Returns the features of each chunk."""
    chunk = _chunk(features)
    return [pl.ds(start, chunk) for start in range(0, features, chunk)]


def _statistics(norm, row):
    """Returns (chunks less their mean, 1 / standard deviation) of a row in float32 chunks."""
    features = sum(len(chunk) for chunk in row)
    if norm.centred:
        mean = sum(jnp.sum(chunk) for chunk in row) / features
        row = [chunk - mean for chunk in row]
    variance = sum(jnp.sum(chunk * chunk) for chunk in row) / features
    return row, lax.rsqrt(variance + norm.epsilon)


def _wide(ref, *index):
    return ref[index].astype(jnp.float32)


@derivatives.batchable
def _kernel(norm, x, *arrays, names):
    """Computes (residual, normed) of x [rows, features] and the other arrays by name."""

    def residual_norm(*refs):
        named = dict(zip(("x", *names), refs))
        *residual, normed = refs[len(named) :]
        row, columns = pl.program_id(0), _chunks(x.shape[-1])
        values = []
        for chunk in columns:
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
        for chunk, value in zip(columns, values):
            result = value * factor * _wide(named["scale"], chunk)
            if "shift" in named:
                result += _wide(named["shift"], chunk)
            normed[row, chunk] = result.astype(normed.dtype)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    count = 2 if "y" in names else 1
    kernel = (
        residual_norm if count == 2 else lambda *refs: residual_norm(*refs[:-1], None, refs[-1])
    )
    return pl.pallas_call(
        kernel,
        grid=(len(x),),
        in_specs=[target.whole(array) for array in (x, *arrays)],
        out_specs=[target.whole(shape)] * count,
        out_shape=[shape] * count,
        compiler_params=target.triton.CompilerParams(num_warps=WARPS, num_stages=1),
    )(x, *arrays)


@derivatives.batchable
def _gradients(norm, residual, scale, dresidual, dnormed, *, sums):
    """Returns dx and float32 [programs, features] sums over rows: of the named ones of `sums`."""
    rows, features = residual.shape
    programs = next(n for n in range(min(PROGRAMS, rows), 0, -1) if rows % n == 0)
    each, columns = rows // programs, _chunks(features)

    def residual_norm_gradient(residual, scale, dresidual, dnormed, dx, *totals):
        program = pl.program_id(0)

        def add(number, carried):
            row = program * each + number
            values, factor = _statistics(norm, [_wide(residual, row, c) for c in columns])
            values = [value * factor for value in values]
            outer = [_wide(dnormed, row, c) for c in columns]
            inner = [dy * _wide(scale, c) for dy, c in zip(outer, columns)]
            along = sum(jnp.sum(a * b) for a, b in zip(inner, values)) / features
            mean = sum(jnp.sum(a) for a in inner) / features if norm.centred else 0.0
            result = []
            for place, c in enumerate(columns):
                gradient = factor * (inner[place] - mean - values[place] * along)
                gradient += _wide(dresidual, row, c)
                dx[row, c] = gradient.astype(dx.dtype)
                result.append(
                    {"scale": outer[place] * values[place], "shift": outer[place], "bias": gradient}
                )
            return [
                [total + terms[name] for total, terms in zip(of_name, result)]
                for name, of_name in zip(sums, carried)
            ]

        zeros = [[jnp.zeros(c.size, jnp.float32) for c in columns] for _ in sums]
        for of_name, total in zip(lax.fori_loop(0, each, add, zeros), totals):
            for c, value in zip(columns, of_name):
                total[program, c] = value

    shapes = [jax.ShapeDtypeStruct(residual.shape, residual.dtype)]
    shapes += [jax.ShapeDtypeStruct((programs, features), jnp.float32)] * len(sums)
    operands = residual, scale, dresidual, dnormed
    return pl.pallas_call(
        residual_norm_gradient,
        grid=(programs,),
        in_specs=[target.whole(array) for array in operands],
        out_specs=[target.whole(shape) for shape in shapes],
        out_shape=shapes,
        compiler_params=target.triton.CompilerParams(num_warps=WARPS, num_stages=1),
    )(*operands)


def _value(options, arrays, parameters):
    norm, alone = options
    (x, *added), (bias, scale, shift) = arrays, parameters
    named = {"y": None, "bias": None} if alone else {"y": added[0], "bias": bias}
    named |= {"scale": scale, "shift": shift}
    named = {name: array for name, array in named.items() if array is not None}
    outputs = _kernel(norm, x, *named.values(), names=tuple(named))
    return (x, *outputs) if alone else tuple(outputs)


def _forward(options, arrays, parameters):
    outputs = _value(options, arrays, parameters)
    return outputs, (outputs[0], parameters)


def _backward(options, saved, cotangents):
    norm, alone = options
    residual, (bias, scale, shift) = saved
    names = {"bias": bias, "scale": scale, "shift": shift}
    sums = tuple(name for name, array in names.items() if array is not None)
    dx, *totals = _gradients(norm, residual, scale, *cotangents, sums=sums)
    by_name = {n: t.sum(0).astype(names[n].dtype) for n, t in zip(sums, totals)}
    return (dx, None if alone else dx), tuple(by_name.get(name) for name in names)


def _tangent(options, saved, tangents):
    norm, _ = options
    residual, (_, scale, shift) = saved
    added, (dbias, *outer) = tangents
    moved = [each for each in (*added, dbias) if each is not None]
    total = sum((each.astype(residual.dtype) for each in moved), jnp.zeros_like(residual))

    def normed(residual, scale, shift):
        return residual_norm_op.run(norm, Operands(residual, None, None, scale, shift))[1]

    operands = residual, scale, shift
    zeros = [jnp.zeros_like(a) if d is None and a is not None else d
             for a, d in zip((scale, shift), outer)]  # fmt: skip
    return total, jax.jvp(normed, operands, (total, *zeros))[1]


_op = derivatives.differentiable(_value, _backward, forward=_forward, tangent=_tangent)
