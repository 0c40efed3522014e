"""The three products of a weight of equal groups on a TPU, each group one dense product.

Grid: (cores, feature tiles of groups, token tiles), tokens innermost.  A group's weight, or its dW,
stays in VMEM over all tokens; x, dy and the results pass through once per feature tile, of which
there is one where VMEM allows.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparse_dataflow.chips.tpu.grouped_matmul.tuning import (
    GroupedGradientTiles,
    GroupedProductTiles,
    streams_x,
)
from sparse_dataflow.chips.tpu.grouped_matmul.windows import (
    Columns,
    Grid,
    TransposedWindow,
    Window,
    current_step,
    over_rows,
)
from sparse_dataflow.chips.tpu.matmul.stream import dot, parameters


def product(
    x: jax.Array,
    weight: jax.Array,
    sides: tuple[Columns, Columns],
    tiles: GroupedProductTiles,
    *,
    transposed: bool,
    vmem_bytes: int,
    cores: int,
) -> jax.Array:
    """Multiply each group's columns of x by its weight.

    Args:
      x: [tokens, features of the first side].
      weight: [groups, K, N]; with `transposed` x has the columns of N and y those of K.
      sides: columns of x and of y.
      tiles: the tile sizes.
      transposed: whether to transpose the weight, as dx needs.
      vmem_bytes: VMEM limit of the kernel.
      cores: cores that share the work.

    Returns:
      y [tokens, features of the second side] in x's dtype.
    """
    left, right = sides
    grid = Grid(len(x), tiles.tokens, left.groups, right.width // tiles.features, cores)
    if transposed:
        weight_spec = unit_spec(grid, (1, tiles.features, left.width), axis=1)
    else:
        weight_spec = unit_spec(grid, (1, left.width, tiles.features), axis=2)
    # A group's columns are strided in x and in y, which no BlockSpec describes: the kernel copies
    # them itself (`Window`).  The weight's index map changes only with the unit, so that a weight
    # is read once for all token tiles.
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(
            _product_kernel, grid=grid, sides=sides, rows=tiles.rows, transposed=transposed
        ),
        grid=grid.shape,
        in_specs=[anywhere, weight_spec],
        out_specs=anywhere,
        scratch_shapes=[
            *Window.scratch(grid, left.width, x.dtype),
            *Window.scratch(grid, tiles.features, x.dtype),
        ],
        out_shape=jax.ShapeDtypeStruct((len(x), right.features), x.dtype),
        compiler_params=parameters(vmem_bytes),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(x) * weight.size,
            bytes_accessed=(grid.tiles * x.size + len(x) * right.features + weight.size)
            * x.dtype.itemsize,
            transcendentals=0,
        ),
        name="grouped_input_gradient" if transposed else "grouped_matmul",
    )(x, weight)


def _product_kernel(x_hbm, weight_ref, y_hbm, *refs, grid, sides, rows, transposed):
    core, step = current_step(grid)
    x = Window(grid, sides[0], False, core, x_hbm, *refs[:2])
    y = Window(grid, sides[1], True, core, y_hbm, *refs[2:])
    start([x], step)
    # A buffer of results is free when its copies of two steps ago are done.
    x_ref, y_ref = x.at(step), y.reuse(step)

    @over_rows(grid.token_tile, rows)
    def _(at):
        y_ref[at, :] = dot(x_ref[at, :], weight_ref[0], transposed).astype(y_ref.dtype)

    finish([y], step)


def start(incoming: list[Window], step: jax.Array) -> None:
    """Wait for a step's operands, and start the copies of the next step's."""

    @pl.when(step == 0)
    def _():
        for window in incoming:
            window.fetch(step)

    # Before the wait, so that these copies run while this step waits and computes.
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
    vmem_bytes: int,
    cores: int,
) -> jax.Array:
    """Compute dW = xᵀ dy of each group, summed in float32 in VMEM over all tokens.

    The narrower side's tile is transposed once per step; the matrix unit streams it.

    Args:
      x: [tokens, features of the first side].
      dy: [tokens, features of the second side] in x's dtype.
      sides: columns of x and of dy.
      tiles: the tile sizes.
      vmem_bytes: VMEM limit of the kernel.
      cores: cores that share the work.

    Returns:
      dW [groups, K, N] in x's dtype.
    """
    left, right = sides
    by_column = streams_x(sides)
    # One factor must be transposed for the matrix unit.  The narrow one is whole in a step, so it
    # is transposed once; the feature tiles cut the wide one.
    narrow, wide = (left, right) if by_column else (right, left)
    grid = Grid(len(x), tiles.tokens, left.groups, wide.width // tiles.features, cores)
    if by_column:
        stored = unit_spec(grid, (1, left.width, tiles.features), axis=2)
    else:
        stored = unit_spec(grid, (1, tiles.features, right.width), axis=1)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(
            _gradient_kernel,
            grid=grid,
            sides=(narrow, wide),
            chunk=tiles.chunk,
            by_column=by_column,
        ),
        grid=grid.shape,
        in_specs=[anywhere] * 2,
        out_specs=stored,
        scratch_shapes=[
            pltpu.VMEM((narrow.width, tiles.features), jnp.float32),
            *TransposedWindow.scratch(grid, narrow.width, x.dtype),
            *Window.scratch(grid, tiles.features, x.dtype),
        ],
        out_shape=jax.ShapeDtypeStruct((left.groups, left.width, right.width), x.dtype),
        compiler_params=parameters(vmem_bytes),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(x) * left.features * right.width,
            bytes_accessed=(x.size + dy.size + left.features * right.width) * x.dtype.itemsize,
            transcendentals=0,
        ),
        name="grouped_weight_gradient",
    )(x, dy)


def _gradient_kernel(x_hbm, dy_hbm, dweight_ref, sum_ref, *refs, grid, sides, chunk, by_column):
    core, step = current_step(grid)
    i, token_tiles = pl.program_id(2), grid.shape[2]
    narrow_hbm, wide_hbm = (x_hbm, dy_hbm) if by_column else (dy_hbm, x_hbm)
    rows, arrived, transposed, *wide_refs = refs
    narrow = TransposedWindow(
        Window(grid, sides[0], False, core, narrow_hbm, rows, arrived), transposed
    )
    wide = Window(grid, sides[1], True, core, wide_hbm, *wide_refs)
    # The narrow side arrives a step earlier, as it is transposed during the step before its use.
    narrow.advance(step)
    start([wide], step)
    wide_ref = wide.at(step)
    chunks = wide_ref.shape[1] // chunk

    @pl.loop(0, chunks)
    def _(c):
        narrow.transpose_next(step, c, chunks)
        # `multiple_of` tells the compiler that the slice begins at a whole tile.
        columns = pl.ds(pl.multiple_of(c * chunk, chunk), chunk)
        factor = wide_ref[:, columns]
        total = dot(narrow.at(step)[...], factor)
        # A select and no product: VMEM holds anything, also NaN, before the first tokens.
        sum_ref[:, columns] = total + jnp.where(i == 0, 0.0, sum_ref[:, columns])

        @pl.when(i == token_tiles - 1)
        def _():
            # Once per unit, not in each step, the sum gets the weight's order of axes.
            whole = sum_ref[:, columns]
            at: tuple = (0, slice(None), columns)
            if not by_column:
                whole, at = whole.T, (0, columns, slice(None))
            dweight_ref[at] = whole.astype(dweight_ref.dtype)


def unit_spec(grid: Grid, shape: tuple[int, ...], axis: int) -> pl.BlockSpec:
    """Return the spec of [groups, ...] whose `axis` the feature tiles cut."""

    # The token tile `i` does not appear: the block stays in VMEM while it counts.
    def index(core, number, i):
        group, tile = grid.unit(core, number)
        return group, *(tile if k == axis else 0 for k in range(1, len(shape)))

    return pl.BlockSpec(shape, index)
