"""The sparse MLP of aligned groups on a TPU: a group's hidden tile never leaves VMEM.

Grid: (cores, groups, token tiles), tokens innermost.  Both weights of a group, and in the backward
pass the sums of both weight gradients, stay in VMEM over all tokens.  The forward pass of a
gradient writes the pre-activation, which the backward pass reads: both passes are bound by the
matrix unit, so that this costs less time than to compute it again.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparse_dataflow.kernels.block_sparse_matmul.pallas_tpu_grouped_kernels import (
    finish,
    parameters,
    start,
    unit_spec,
)
from sparse_dataflow.kernels.block_sparse_matmul.pallas_tpu_grouped_windows import (
    Columns,
    Grid,
    TransposedWindow,
    Window,
    current_step,
    over_rows,
)
from sparse_dataflow.kernels.block_sparse_matmul.pallas_tpu_stream import pop_if, precision
from sparse_dataflow.kernels.gelu.api import value_and_derivative
from sparse_dataflow.kernels.sparse_mlp.tuning_grouped import MlpBackwardTiles, MlpForwardTiles


def forward(
    x: jax.Array,
    weight_in: jax.Array,
    bias_in: jax.Array,
    weight_out: jax.Array,
    sides: tuple[Columns, Columns],
    tiles: MlpForwardTiles,
    *,
    with_preactivation: bool,
    vmem_bytes: int,
    cores: int,
    interpret=False,
) -> tuple[jax.Array, ...]:
    """Compute gelu(x W_in + bias_in) W_out of each group.

    Args:
      x: [tokens, features of the first side].
      weight_in: [groups, K, H].
      bias_in: float32 [groups, 1, H].
      weight_out: [groups, H, N].
      sides: columns of x and of y.
      tiles: the tile sizes.
      with_preactivation: whether to return the GELU's input too.
      vmem_bytes: VMEM limit of the kernel.
      cores: cores that share the groups.
      interpret: as in `pl.pallas_call`.

    Returns:
      (y,) or (y, pre-activation [tokens, groups * H]) in x's dtype.
    """
    left, right = sides
    hidden = _hidden_columns(weight_in)
    grid = Grid(len(x), tiles.tokens, left.groups, 1, cores)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    results = [jax.ShapeDtypeStruct((len(x), right.features), x.dtype)]
    scratch = [
        *Window.scratch(grid, left.width, x.dtype),
        *Window.scratch(grid, right.width, x.dtype),
    ]
    if with_preactivation:
        results.append(jax.ShapeDtypeStruct((len(x), hidden.features), x.dtype))
        scratch += Window.scratch(grid, hidden.width, x.dtype)
    stored = weight_in.size + weight_out.size
    return pl.pallas_call(
        functools.partial(
            _forward_kernel,
            grid=grid,
            columns=(left, right, hidden),
            rows=tiles.rows,
            with_preactivation=with_preactivation,
        ),
        grid=grid.shape,
        in_specs=[anywhere, *(_whole(grid, a) for a in (weight_in, bias_in, weight_out))],
        out_specs=[anywhere] * len(results),
        scratch_shapes=scratch,
        out_shape=results,
        compiler_params=parameters(vmem_bytes),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(x) * stored,
            bytes_accessed=(x.size + sum(result.size for result in results) + stored)
            * x.dtype.itemsize,
            transcendentals=len(x) * hidden.features,
        ),
        interpret=interpret,
        name="grouped_mlp",
    )(x, weight_in, bias_in, weight_out)


def _forward_kernel(
    x_hbm, in_ref, bias_ref, out_ref, *result_refs, grid, columns, rows, with_preactivation
):
    refs = list(result_refs)
    y_hbm, preactivation_hbm = refs.pop(0), pop_if(with_preactivation, refs)
    core, step = current_step(grid)
    x, y = (
        Window(grid, side, False, core, hbm, refs.pop(0), refs.pop(0))
        for side, hbm in zip(columns, (x_hbm, y_hbm))
    )
    outgoing = [y]
    if with_preactivation:
        outgoing.append(Window(grid, columns[2], False, core, preactivation_hbm, *refs))
    start([x], step)
    x_ref = x.at(step)
    y_ref, *preactivation_ref = (result.reuse(step) for result in outgoing)

    @over_rows(grid.token_tile, rows)
    def _(at):
        total = _dot(x_ref[at, :], in_ref[0]) + bias_ref[0]
        if with_preactivation:
            preactivation_ref[0][at, :] = total.astype(y_ref.dtype)
        hidden = value_and_derivative(total)[0].astype(y_ref.dtype)
        y_ref[at, :] = _dot(hidden, out_ref[0]).astype(y_ref.dtype)

    finish(outgoing, step)


def backward(
    x: jax.Array,
    dy: jax.Array,
    preactivation: jax.Array,
    weight_in: jax.Array,
    weight_out: jax.Array,
    sides: tuple[Columns, Columns],
    tiles: MlpBackwardTiles,
    *,
    vmem_bytes: int,
    cores: int,
    interpret=False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute the gradients of `forward` with respect to x, weight_in, bias_in and weight_out.

    Args:
      x: [tokens, features of the first side].
      dy: [tokens, features of the second side].
      preactivation: [tokens, groups * H], as `forward` returns it.
      weight_in: [groups, K, H].
      weight_out: [groups, H, N].
      sides: columns of x and of y.
      tiles: the tile sizes.
      vmem_bytes: VMEM limit of the kernel.
      cores: cores that share the groups.
      interpret: as in `pl.pallas_call`.

    Returns:
      (dx, dW_in, float32 dbias [groups, 1, H], dW_out).
    """
    left, right = sides
    hidden = _hidden_columns(weight_in)
    grid = Grid(len(x), tiles.tokens, left.groups, 1, cores)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    results = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(weight_in.shape, x.dtype),
        jax.ShapeDtypeStruct((left.groups, 1, hidden.width), jnp.float32),
        jax.ShapeDtypeStruct(weight_out.shape, x.dtype),
    ]
    stored = weight_in.size + weight_out.size
    return pl.pallas_call(
        functools.partial(
            _backward_kernel, grid=grid, columns=(left, right, hidden), chunk=tiles.chunk
        ),
        grid=grid.shape,
        in_specs=[anywhere] * 3 + [_whole(grid, weight) for weight in (weight_in, weight_out)],
        out_specs=[anywhere, *(_whole(grid, result) for result in results[1:])],
        scratch_shapes=[
            *TransposedWindow.scratch(grid, left.width, x.dtype),
            *TransposedWindow.scratch(grid, right.width, x.dtype, buffers=3),
            *Window.scratch(grid, hidden.width, x.dtype),
            *Window.scratch(grid, left.width, x.dtype),
            pltpu.VMEM((left.width, hidden.width), jnp.float32),
            pltpu.VMEM((right.width, hidden.width), jnp.float32),
            pltpu.VMEM((grid.token_tile, left.width), jnp.float32),
        ],
        out_shape=results,
        compiler_params=parameters(vmem_bytes),
        cost_estimate=pl.CostEstimate(
            flops=4 * len(x) * stored,
            bytes_accessed=(2 * x.size + dy.size + preactivation.size + 2 * stored)
            * x.dtype.itemsize,
            transcendentals=preactivation.size,
        ),
        interpret=interpret,
        name="grouped_mlp_gradient",
    )(x, dy, preactivation, weight_in, weight_out)


def _backward_kernel(
    x_hbm,
    dy_hbm,
    preactivation_hbm,
    in_ref,
    out_ref,
    dx_hbm,
    din_ref,
    dbias_ref,
    dout_ref,
    *scratch_refs,
    grid,
    columns,
    chunk,
):
    refs = list(scratch_refs)
    left, right, hidden = columns
    core, step = current_step(grid)
    i = pl.program_id(2)

    def window(side, hbm):
        return Window(grid, side, False, core, hbm, refs.pop(0), refs.pop(0))

    x = TransposedWindow(window(left, x_hbm), refs.pop(0))
    dy = TransposedWindow(window(right, dy_hbm), refs.pop(0))
    preactivation = window(hidden, preactivation_hbm)
    dx = window(left, dx_hbm)
    din_sum, dout_sum, dx_sum = refs
    dx_ref = dx.reuse(step)
    start([preactivation], step)
    x.advance(step)
    dy.advance(step)
    z_ref, dy_ref = preactivation.at(step), dy.window.at(step)
    chunks = hidden.width // chunk

    def add(sum_ref, summand, first):
        sum_ref[...] = summand + jnp.where(first, 0.0, sum_ref[...])

    @pl.loop(0, chunks)
    def _(c):
        at = pl.ds(pl.multiple_of(c * chunk, chunk), chunk)
        x.transpose_next(step, c, chunks)
        dy.transpose_next(step, c, chunks)
        activations, slope = value_and_derivative(z_ref[:, at].astype(jnp.float32))
        derived = _dot(dy_ref[...], out_ref[0, at, :], transposed=True) * slope
        dbias = jnp.sum(grid.zero_repeated_rows(derived, i), axis=0, keepdims=True)
        add(dbias_ref.at[0, :, at], dbias, i == 0)
        derived = derived.astype(dx_ref.dtype)
        add(dx_sum, _dot(derived, in_ref[0, :, at], transposed=True), c == 0)
        add(din_sum.at[:, at], _dot(x.at(step)[...], derived), i == 0)
        dout = _dot(dy.at(step)[...], activations.astype(dx_ref.dtype))
        add(dout_sum.at[:, at], dout, i == 0)

        @pl.when(i == grid.shape[2] - 1)
        def _():
            din_ref[0, :, at] = din_sum[:, at].astype(din_ref.dtype)
            dout_ref[0, at, :] = dout_sum[:, at].T.astype(dout_ref.dtype)

    dx_ref[...] = dx_sum[...].astype(dx_ref.dtype)
    finish([dx], step)


def _dot(a, b, transposed=False):
    """Multiply a by b, or by its transpose, in float32."""
    return lax.dot_general(
        a,
        b,
        (((1,), (1 if transposed else 0,)), ((), ())),
        precision=precision(a.dtype),
        preferred_element_type=jnp.float32,
    )


def _hidden_columns(weight_in):
    groups, _, width = weight_in.shape
    return Columns(groups, width, width)


def _whole(grid, array):
    return unit_spec(grid, (1, *array.shape[1:]), axis=0)
