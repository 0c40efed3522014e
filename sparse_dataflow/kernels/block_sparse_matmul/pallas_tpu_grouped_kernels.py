"""The three products of a weight of equal groups on a TPU, each group one dense product.

Grid: (cores, feature tiles of groups, token tiles), tokens innermost.  A group's weight, or its dW,
stays in VMEM over all tokens; x, dy and the results pass through once per feature tile, of which
there is one where VMEM allows.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparse_dataflow.kernels.block_sparse_matmul.pallas_tpu_grouped_windows import (
    Columns,
    Grid,
    TransposedWindow,
    Window,
    current_step,
    over_rows,
)
from sparse_dataflow.kernels.block_sparse_matmul.pallas_tpu_stream import pop_if, precision
from sparse_dataflow.kernels.block_sparse_matmul.tuning_grouped import (
    GroupedGradientTiles,
    GroupedProductTiles,
    streams_x,
)
from sparse_dataflow.kernels.gelu.api import value_and_derivative


def product(
    x: jax.Array,
    weight: jax.Array,
    sides: tuple[Columns, Columns],
    tiles: GroupedProductTiles,
    *,
    transposed: bool,
    bias: jax.Array | None = None,
    gelu: bool = False,
    residual: jax.Array | None = None,
    with_preactivation: bool = False,
    vmem_bytes: int,
    cores: int,
    interpret=False,
) -> tuple[jax.Array, ...]:
    """Multiply each group's columns of x by its weight.

    Args:
      x: [tokens, features of the first side].
      weight: [groups, K, N]; with `transposed` x has the columns of N and y those of K.
      sides: columns of x and of y.
      tiles: the tile sizes.
      transposed: whether to transpose the weight, as dx needs.
      bias: float32 [groups, 1, N].
      gelu: whether to apply a GELU after the bias.
      residual: [tokens, features of the second side], added last.
      with_preactivation: whether to return the GELU's input too.
      vmem_bytes: VMEM limit of the kernel.
      cores: cores that share the work.
      interpret: as in `pl.pallas_call`.

    Returns:
      (y,) or (y, pre-activation), each [tokens, features of the second side] in x's dtype.
    """
    left, right = sides
    grid = Grid(len(x), tiles.tokens, left.groups, right.width // tiles.features, cores)
    if transposed:
        weight_spec = unit_spec(grid, (1, tiles.features, left.width), axis=1)
    else:
        weight_spec = unit_spec(grid, (1, left.width, tiles.features), axis=2)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    operands = [
        (x, anywhere),
        (weight, weight_spec),
        (bias, unit_spec(grid, (1, 1, tiles.features), axis=2)),
        (residual, anywhere),
    ]
    operands = [(array, spec) for array, spec in operands if array is not None]
    results = 1 + with_preactivation
    wide = results + (residual is not None)
    scratch = Window.scratch(grid, left.width, x.dtype)
    for _ in range(wide):
        scratch += Window.scratch(grid, tiles.features, x.dtype)
    return pl.pallas_call(
        functools.partial(
            _product_kernel,
            grid=grid,
            sides=sides,
            rows=tiles.rows,
            transposed=transposed,
            has_bias=bias is not None,
            gelu=gelu,
            has_residual=residual is not None,
            with_preactivation=with_preactivation,
        ),
        grid=grid.shape,
        in_specs=[spec for _, spec in operands],
        out_specs=[anywhere] * results,
        scratch_shapes=scratch,
        out_shape=[jax.ShapeDtypeStruct((len(x), right.features), x.dtype)] * results,
        compiler_params=parameters(vmem_bytes),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(x) * weight.size,
            bytes_accessed=(grid.tiles * x.size + wide * len(x) * right.features + weight.size)
            * x.dtype.itemsize,
            transcendentals=len(x) * right.features * gelu,
        ),
        interpret=interpret,
        name="grouped_input_gradient" if transposed else "grouped_matmul",
    )(*(array for array, _ in operands))


def _product_kernel(
    x_hbm,
    weight_ref,
    *optional_refs,
    grid,
    sides,
    rows,
    transposed,
    has_bias,
    gelu,
    has_residual,
    with_preactivation,
):
    refs = list(optional_refs)
    bias_ref, residual_hbm = pop_if(has_bias, refs), pop_if(has_residual, refs)
    y_hbm, preactivation_hbm = refs.pop(0), pop_if(with_preactivation, refs)
    core, step = current_step(grid)

    def window(columns, tiled, hbm):
        return Window(grid, columns, tiled, core, hbm, refs.pop(0), refs.pop(0))

    x = window(sides[0], False, x_hbm)
    y = window(sides[1], True, y_hbm)
    incoming, outgoing = [x], [y]
    if has_residual:
        residual = window(sides[1], True, residual_hbm)
        incoming.append(residual)
    if with_preactivation:
        preactivation = window(sides[1], True, preactivation_hbm)
        outgoing.append(preactivation)
    start(incoming, step)
    x_ref = x.at(step)
    y_ref, *preactivation_ref = (result.reuse(step) for result in outgoing)
    contraction = ((1,), (1 if transposed else 0,))

    @over_rows(grid.token_tile, rows)
    def _(at):
        total = lax.dot_general(
            x_ref[at, :],
            weight_ref[0],
            (contraction, ((), ())),
            precision=precision(x_ref.dtype),
            preferred_element_type=jnp.float32,
        )
        if has_bias:
            total = total + bias_ref[0]
        if with_preactivation:
            preactivation_ref[0][at, :] = total.astype(y_ref.dtype)
        if gelu:
            total = value_and_derivative(total)[0]
        if has_residual:
            total = total + residual.at(step)[at, :].astype(jnp.float32)
        y_ref[at, :] = total.astype(y_ref.dtype)

    finish(outgoing, step)


def start(incoming: list[Window], step: jax.Array) -> None:
    """Wait for a step's operands, and start the copies of the next step's."""

    @pl.when(step == 0)
    def _():
        for window in incoming:
            window.fetch(step)

    for window in incoming:
        window.fetch(step + 1)
    for window in incoming:
        window.wait(step)


def finish(outgoing: list[Window], step: jax.Array) -> None:
    """Start the copies of a step's results; at the last step wait for them."""
    for window in outgoing:
        window.send(step)
    for window in outgoing:
        window.drain(step)


def gradient(
    x: jax.Array,
    dy: jax.Array,
    sides: tuple[Columns, Columns],
    tiles: GroupedGradientTiles,
    *,
    preactivation: jax.Array | None = None,
    vmem_bytes: int,
    cores: int,
    interpret=False,
) -> tuple[jax.Array, ...]:
    """Compute dW = xᵀ dy of each group, summed in float32 in VMEM over all tokens.

    The narrower side's tile is transposed once per step; the matrix unit streams it.

    Args:
      x: [tokens, features of the first side].
      dy: [tokens, features of the second side] in x's dtype.
      sides: columns of x and of dy.
      tiles: the tile sizes.
      preactivation: [tokens, features of the second side], the input of a GELU that follows.
      vmem_bytes: VMEM limit of the kernel.
      cores: cores that share the work.
      interpret: as in `pl.pallas_call`.

    Returns:
      (dW [groups, K, N],), or with `preactivation` (dW, dz in dy's dtype, float32 sum of dz over
      tokens [groups, 1, N]).
    """
    left, right = sides
    activated = preactivation is not None
    by_column = streams_x(sides, activated)
    narrow, wide = (left, right) if by_column else (right, left)
    grid = Grid(len(x), tiles.tokens, left.groups, wide.width // tiles.features, cores)
    if by_column:
        stored = unit_spec(grid, (1, left.width, tiles.features), axis=2)
    else:
        stored = unit_spec(grid, (1, tiles.features, right.width), axis=1)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    operands = [array for array in (x, dy, preactivation) if array is not None]
    results = [(jax.ShapeDtypeStruct((left.groups, left.width, right.width), x.dtype), stored)]
    scratch = [
        pltpu.VMEM((narrow.width, tiles.features), jnp.float32),
        *TransposedWindow.scratch(grid, narrow.width, x.dtype),
        *Window.scratch(grid, tiles.features, x.dtype),
    ]
    if activated:
        flat = unit_spec(grid, (1, 1, tiles.features), axis=2)
        results.append((jax.ShapeDtypeStruct(dy.shape, dy.dtype), anywhere))
        results.append((jax.ShapeDtypeStruct((left.groups, 1, right.width), jnp.float32), flat))
        scratch += 2 * Window.scratch(grid, tiles.features, x.dtype)
    return pl.pallas_call(
        functools.partial(
            _gradient_kernel,
            grid=grid,
            sides=(narrow, wide),
            chunk=tiles.chunk,
            by_column=by_column,
            activated=activated,
        ),
        grid=grid.shape,
        in_specs=[anywhere] * len(operands),
        out_specs=[spec for _, spec in results],
        scratch_shapes=scratch,
        out_shape=[shape for shape, _ in results],
        compiler_params=parameters(vmem_bytes),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(x) * left.features * right.width,
            bytes_accessed=(x.size + dy.size * (1 + 2 * activated)) * x.dtype.itemsize
            + left.features * right.width * x.dtype.itemsize,
            transcendentals=dy.size * activated,
        ),
        interpret=interpret,
        name="grouped_weight_gradient",
    )(*operands)


def _gradient_kernel(x_hbm, dy_hbm, *optional_refs, grid, sides, chunk, by_column, activated):
    refs = list(optional_refs)
    preactivation_hbm = pop_if(activated, refs)
    dweight_ref = refs.pop(0)
    dz_hbm, dbias_ref = pop_if(activated, refs), pop_if(activated, refs)
    sum_ref = refs.pop(0)
    core, step = current_step(grid)
    i, token_tiles = pl.program_id(2), grid.shape[2]

    def window(columns, tiled, hbm):
        return Window(grid, columns, tiled, core, hbm, refs.pop(0), refs.pop(0))

    narrow_hbm, wide_hbm = (x_hbm, dy_hbm) if by_column else (dy_hbm, x_hbm)
    narrow = window(sides[0], False, narrow_hbm)
    narrow = TransposedWindow(narrow, refs.pop(0))
    wide = window(sides[1], True, wide_hbm)
    incoming, outgoing = [wide], []
    if activated:
        preactivation = window(sides[1], True, preactivation_hbm)
        dz = window(sides[1], True, dz_hbm)
        incoming.append(preactivation)
        outgoing.append(dz)
        dz_ref = dz.reuse(step)
    narrow.advance(step)
    start(incoming, step)
    wide_ref = wide.at(step)
    chunks = wide_ref.shape[1] // chunk

    @pl.loop(0, chunks)
    def _(c):
        narrow.transpose_next(step, c, chunks)
        columns = pl.ds(pl.multiple_of(c * chunk, chunk), chunk)
        if activated:
            slope = value_and_derivative(preactivation.at(step)[:, columns].astype(jnp.float32))[1]
            derived = wide_ref[:, columns].astype(jnp.float32) * slope
            dz_ref[:, columns] = derived.astype(dz_ref.dtype)
            dbias = jnp.sum(grid.zero_repeated_rows(derived, i), axis=0, keepdims=True)
            dbias_ref[0, :, columns] = jnp.where(i == 0, dbias, dbias_ref[0, :, columns] + dbias)
            factor = derived.astype(dz_ref.dtype)
        else:
            factor = wide_ref[:, columns]
        total = jnp.dot(
            narrow.at(step)[...],
            factor,
            precision=precision(factor.dtype),
            preferred_element_type=jnp.float32,
        )
        sum_ref[:, columns] = total + jnp.where(i == 0, 0.0, sum_ref[:, columns])

        @pl.when(i == token_tiles - 1)
        def _():
            whole = sum_ref[:, columns]
            at: tuple = (0, slice(None), columns)
            if not by_column:
                whole, at = whole.T, (0, columns, slice(None))
            dweight_ref[at] = whole.astype(dweight_ref.dtype)

    finish(outgoing, step)


def unit_spec(grid: Grid, shape: tuple[int, ...], axis: int) -> pl.BlockSpec:
    """Return the spec of [groups, ...] whose `axis` the feature tiles cut."""

    def index(core, number, i):
        group, tile = grid.unit(core, number)
        return group, *(tile if k == axis else 0 for k in range(1, len(shape)))

    return pl.BlockSpec(shape, index)


def parameters(vmem_bytes: int) -> pltpu.CompilerParams:
    """Return the compiler parameters of a kernel with a `Grid`."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary", "arbitrary"),
        vmem_limit_bytes=vmem_bytes,
        disable_bounds_checks=True,
    )
