"""The sparse MLP of aligned groups on a TPU: a group's hidden tile never leaves VMEM.

Grid: (cores, groups, token tiles), tokens innermost.  All weights of a group, and in the backward
pass the sums of their gradients, stay in VMEM over all tokens.  The forward pass of a gradient
writes the pre-activations, which the backward pass reads: both passes are bound by the matrix unit,
so that this costs less time than to compute them again.

The weights into the hidden layer are (W_in,), or (W_in, W_gate) of an MLP with a gate.  The
activation applies to the product of the last one.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparse_dataflow.chips.tpu.grouped_matmul.kernels import finish, start, unit_spec
from sparse_dataflow.chips.tpu.grouped_matmul.windows import (
    Columns,
    Grid,
    TransposedWindow,
    Window,
    current_step,
    over_rows,
)
from sparse_dataflow.chips.tpu.grouped_mlp_tuning import MlpBackwardTiles, MlpForwardTiles
from sparse_dataflow.chips.tpu.matmul.stream import dot, parameters, pop_if
from sparse_dataflow.core.ops.activation import value_and_derivative


def forward(
    x: jax.Array,
    weights_in: tuple[jax.Array, ...],
    bias_in: jax.Array | None,
    weight_out: jax.Array,
    sides: tuple[Columns, Columns],
    tiles: MlpForwardTiles,
    *,
    activation: str,
    with_preactivation: bool,
    vmem_bytes: int,
    cores: int,
) -> tuple[jax.Array, ...]:
    """Compute activation(x W_in + bias_in) W_out of each group, or with a gate.

    Args:
      x: [tokens, features of the first side].
      weights_in: [groups, K, H] each.
      bias_in: float32 [groups, 1, H], added to x W_in; None for none.
      weight_out: [groups, H, N].
      sides: columns of x and of y.
      tiles: the tile sizes.
      activation: name of a fused one in `config.activations`.
      with_preactivation: whether to return the products of `weights_in` too.
      vmem_bytes: VMEM limit of the kernel.
      cores: cores that share the groups.

    Returns:
      (y,) or (y, products [tokens, groups * len(weights_in) * H]) in x's dtype.
    """
    left, right = sides
    hidden = _hidden_columns(weights_in)
    # A unit is a whole group, as the hidden layer of a group needs all of its weights.  Tokens are
    # the innermost axis, so these weights stay in VMEM while the tokens pass.
    grid = Grid(len(x), tiles.tokens, left.groups, 1, cores)
    # Activations stay in HBM: a group's columns are runs at a stride, which `Window` copies.
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    results = [jax.ShapeDtypeStruct((len(x), right.features), x.dtype)]
    scratch = [
        *Window.scratch(grid, left.width, x.dtype),
        *Window.scratch(grid, right.width, x.dtype),
    ]
    if with_preactivation:
        results.append(jax.ShapeDtypeStruct((len(x), hidden.features), x.dtype))
        scratch += Window.scratch(grid, hidden.width, x.dtype)
    stored = sum(weight.size for weight in (*weights_in, weight_out))
    operands = [*weights_in, *([] if bias_in is None else [bias_in]), weight_out]
    return pl.pallas_call(
        functools.partial(
            _forward_kernel,
            grid=grid,
            columns=(left, right, hidden),
            rows=tiles.rows,
            products=len(weights_in),
            biased=bias_in is not None,
            activation=activation,
            with_preactivation=with_preactivation,
        ),
        grid=grid.shape,
        in_specs=[anywhere, *(_whole(grid, operand) for operand in operands)],
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
        name="grouped_mlp",
    )(x, *operands)


def _forward_kernel(
    x_hbm, *operand_refs, grid, columns, rows, products, biased, activation, with_preactivation
):
    refs = list(operand_refs)
    in_refs = [refs.pop(0) for _ in range(products)]
    bias_ref, out_ref = pop_if(biased, refs), refs.pop(0)
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
    # A buffer of results is free again when the copies of the step before the last are done.
    x_ref = x.at(step)
    y_ref, *preactivation_ref = (result.reuse(step) for result in outgoing)

    # Some rows at a time bound the float32 hidden activations in VMEM.
    @over_rows(grid.token_tile, rows)
    def _(at):
        totals = [dot(x_ref[at, :], in_ref[0]) for in_ref in in_refs]
        if biased:
            totals[0] += bias_ref[0]
        if with_preactivation:
            width = totals[0].shape[1]
            # Side by side, as the backward kernel reads them.
            for number, total in enumerate(totals):
                columns_of_total = pl.ds(number * width, width)
                preactivation_ref[0][at, columns_of_total] = total.astype(y_ref.dtype)
        hidden = value_and_derivative(activation, totals[-1])[0]
        if products > 1:
            hidden *= totals[0]
        y_ref[at, :] = dot(hidden.astype(y_ref.dtype), out_ref[0]).astype(y_ref.dtype)

    finish(outgoing, step)


def backward(
    x: jax.Array,
    dy: jax.Array,
    preactivation: jax.Array,
    weights_in: tuple[jax.Array, ...],
    weight_out: jax.Array,
    sides: tuple[Columns, Columns],
    tiles: MlpBackwardTiles,
    *,
    activation: str,
    biased: bool,
    vmem_bytes: int,
    cores: int,
) -> tuple[jax.Array, tuple[jax.Array, ...], jax.Array | None, jax.Array]:
    """Compute the gradients of `forward` with respect to x, weights_in, bias_in and weight_out.

    Args:
      x: [tokens, features of the first side].
      dy: [tokens, features of the second side].
      preactivation: the products that `forward` returns.
      weights_in: [groups, K, H] each.
      weight_out: [groups, H, N].
      sides: columns of x and of y.
      tiles: the tile sizes.
      activation: name of a fused one in `config.activations`.
      biased: whether W_in has a bias.
      vmem_bytes: VMEM limit of the kernel.
      cores: cores that share the groups.

    Returns:
      (dx, gradients of weights_in, float32 dbias [groups, 1, H] or None, dW_out).
    """
    left, right = sides
    hidden = _hidden_columns(weights_in)
    width = weight_out.shape[1]
    grid = Grid(len(x), tiles.tokens, left.groups, 1, cores)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    # Gradients of weights are sums over tokens.  Their float32 sums stay in scratch of a group and
    # are rounded once, after its last token tile.
    results = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        *(jax.ShapeDtypeStruct(weight.shape, x.dtype) for weight in (*weights_in, weight_out)),
    ]
    if biased:
        results.append(jax.ShapeDtypeStruct((left.groups, 1, width), jnp.float32))
    stored = sum(weight.size for weight in (*weights_in, weight_out))
    dx, *dweights = pl.pallas_call(
        functools.partial(
            _backward_kernel,
            grid=grid,
            columns=(left, right, hidden),
            chunk=tiles.chunk,
            products=len(weights_in),
            biased=biased,
            activation=activation,
        ),
        grid=grid.shape,
        in_specs=[anywhere] * 3 + [_whole(grid, weight) for weight in (*weights_in, weight_out)],
        out_specs=[anywhere, *(_whole(grid, result) for result in results[1:])],
        scratch_shapes=[
            *TransposedWindow.scratch(grid, left.width, x.dtype),
            # Three buffers, as the dots read the rows of dy themselves besides their transposes.
            *TransposedWindow.scratch(grid, right.width, x.dtype, buffers=3),
            *Window.scratch(grid, hidden.width, x.dtype),
            *Window.scratch(grid, left.width, x.dtype),
            *(pltpu.VMEM((left.width, width), jnp.float32) for _ in weights_in),
            # [N, H], the transpose of W_out: see the kernel.
            pltpu.VMEM((right.width, width), jnp.float32),
            pltpu.VMEM((grid.token_tile, left.width), jnp.float32),
        ],
        out_shape=results,
        compiler_params=parameters(vmem_bytes),
        cost_estimate=pl.CostEstimate(
            flops=4 * len(x) * stored,
            bytes_accessed=(2 * x.size + dy.size + preactivation.size + 2 * stored)
            * x.dtype.itemsize,
            transcendentals=len(x) * left.groups * width,
        ),
        name="grouped_mlp_gradient",
    )(x, dy, preactivation, *weights_in, weight_out)
    dbias = dweights.pop() if biased else None
    *dweights_in, dweight_out = dweights
    return dx, tuple(dweights_in), dbias, dweight_out


def _backward_kernel(
    x_hbm,
    dy_hbm,
    preactivation_hbm,
    *operand_refs,
    grid,
    columns,
    chunk,
    products,
    biased,
    activation,
):
    refs = list(operand_refs)
    in_refs, out_ref = [refs.pop(0) for _ in range(products)], refs.pop(0)
    dx_hbm = refs.pop(0)
    din_refs, dout_ref = [refs.pop(0) for _ in range(products)], refs.pop(0)
    dbias_ref = pop_if(biased, refs)
    left, right, hidden = columns
    width = hidden.width // products
    core, step = current_step(grid)
    i = pl.program_id(2)

    def window(side, hbm):
        return Window(grid, side, False, core, hbm, refs.pop(0), refs.pop(0))

    x = TransposedWindow(window(left, x_hbm), refs.pop(0))
    dy = TransposedWindow(window(right, dy_hbm), refs.pop(0))
    preactivation = window(hidden, preactivation_hbm)
    dx = window(left, dx_hbm)
    *din_sums, dout_sum, dx_sum = refs
    dx_ref = dx.reuse(step)
    start([preactivation], step)
    x.advance(step)
    dy.advance(step)
    z_ref, dy_ref = preactivation.at(step), dy.window.at(step)
    # Chunks of hidden features: their activations and gradients are in float32.
    chunks = width // chunk

    def add(sum_ref, summand, first):
        # A select and no product: VMEM holds anything, also NaN, before the first summand.
        sum_ref[...] = summand + jnp.where(first, 0.0, sum_ref[...])

    @pl.loop(0, chunks)
    def _(c):
        at = pl.ds(pl.multiple_of(c * chunk, chunk), chunk)
        x.transpose_next(step, c, chunks)
        dy.transpose_next(step, c, chunks)
        # A gated MLP stores (ungated, gate) side by side; the activation reads the last product.
        activated = pl.ds(pl.multiple_of((products - 1) * width + c * chunk, chunk), chunk)
        z = z_ref[:, activated].astype(jnp.float32)
        activations, slope = value_and_derivative(activation, z)
        dhidden = dot(dy_ref[...], out_ref[0, at, :], transposed=True)
        # Gradients of the products into the hidden layer, in the order of `weights_in`.
        derived = [dhidden * slope]
        if products > 1:
            ungated = z_ref[:, at].astype(jnp.float32)
            derived = [dhidden * activations, derived[0] * ungated]
            activations *= ungated
        if biased:
            # The dots with x and dy have zeros in repeated rows already; this sum has not.
            dbias = jnp.sum(grid.zero_repeated_rows(derived[0], i), axis=0, keepdims=True)
            add(dbias_ref.at[0, :, at], dbias, i == 0)
        rounded = [each.astype(dx_ref.dtype) for each in derived]
        pairs = list(zip(rounded, in_refs))
        # dx is a sum over all hidden features, so over all chunks of a step.
        add(dx_sum, sum(dot(d, ref[0, :, at], transposed=True) for d, ref in pairs), c == 0)
        # Sums over tokens begin with the first token tile of each group.
        for each, din_sum in zip(rounded, din_sums):
            add(din_sum.at[:, at], dot(x.at(step)[...], each), i == 0)
        # (dW_out)ᵀ = dyᵀ h, with the transposed dy that a window has anyway.  The sum is transposed
        # once after the last tokens; dW_out = hᵀ dy would transpose h in every step.
        dout = dot(dy.at(step)[...], activations.astype(dx_ref.dtype))
        add(dout_sum.at[:, at], dout, i == 0)

        @pl.when(i == grid.shape[2] - 1)
        def _():
            for din_ref, din_sum in zip(din_refs, din_sums):
                din_ref[0, :, at] = din_sum[:, at].astype(din_ref.dtype)
            dout_ref[0, at, :] = dout_sum[:, at].T.astype(dout_ref.dtype)

    dx_ref[...] = dx_sum[...].astype(dx_ref.dtype)
    finish([dx], step)


def _hidden_columns(weights_in):
    groups, _, width = weights_in[0].shape
    return Columns(groups, len(weights_in) * width, len(weights_in) * width)


def _whole(grid, array):
    return unit_spec(grid, (1, *array.shape[1:]), axis=0)
