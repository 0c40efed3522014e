"""y = xW and dx = dy Wᵀ on a Hopper GPU: a producer follows the table, two consumers multiply.

One persistent program a multiprocessor (or a pair of them, a cluster) takes tiles of the result,
[2 * rows tokens, columns], one after another.  Its producer warp group reads the line of the table
and copies, for each stored block, the block and the tokens' features that it meets into a ring of
stages; each of two consumer warp groups multiplies its half of the tokens by the same block
(wgmma), releases the stage, and writes its results through shared memory.  The ring runs on from
tile to tile, so that loads for the next tile pass while results are written, and the two
consumers, which only the ring ties together, drift apart until one multiplies while the other
writes.

What bounds the rate is the L2 cache.  A block column of width c reads each token's features once
a stored block, so a tile of t tokens costs 2 (t + c) bytes for t c multiply-adds a feature: at
block 128 and 256 tokens, 48 bytes a cycle and multiprocessor at the full rate of the tensor cores
(a dense tile of 256 x 128 reads as much), and at a single block of 64, 80; two of them side by side
(`pallas_hopper_tables`) read as one of 128.  A cluster of two shares each block by multicast, which
leaves 40 and 72.  Tiles are taken column by column within a group of token
tiles whose features fit half the L2 cache, so that device memory is read about once.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sparse_dataflow.kernels.block_sparse_matmul.pallas_hopper_memory import run_groups, swizzled
from sparse_dataflow.kernels.block_sparse_matmul.pallas_hopper_plan import ProductPlan, stored_of
from sparse_dataflow.kernels.block_sparse_matmul.pallas_hopper_tables import LineTables
from sparse_dataflow.kernels.block_sparse_matmul.tuning_hopper import (
    CONSUMERS,
    SLICE_ROWS,
    ProductTiles,
)
from sparse_dataflow.kernels.gelu.api import value_and_derivative


def line_product(
    x: jax.Array,
    values: jax.Array,
    tables: LineTables,
    tiles: ProductTiles,
    *,
    transposed: bool,
    dtype: Any = jnp.bfloat16,
    bias: jax.Array | None = None,
    gelu: bool = False,
    residual: jax.Array | None = None,
    preactivation: jax.Array | None = None,
    keep: bool = False,
    columns: int,
    multiprocessors: int,
) -> tuple[jax.Array, ...]:
    """x times the stored blocks of each line.

    Args:
      x: bfloat16 [tokens, features].
      values: bfloat16 [nnz, block, block].
      tables: the lines, as many side by side as the tiles have.
      tiles: the tile sizes.
      transposed: whether the blocks are used transposed, as dx does.
      dtype: of the results.
      bias: float32 [lines * width * block], added to the product.
      gelu: whether the sum passes a GELU.
      residual: [tokens, lines * width * block] in the results' dtype, added last; columns may lack
        at the end, of the bias too.
      preactivation: like the residual, at which the derivative of a GELU multiplies
        the product; excludes bias, gelu, residual and keep.
      keep: whether what enters the GELU is a second result; excludes residual.
      columns: of the results, at most all of the lines'.
      multiprocessors: of the device.

    Returns:
      (y,) or (y, pre-activation), [tokens, columns].
    """
    tokens, block = len(x), values.shape[1]
    lines, fan = tables.index.shape
    parts = max(1, block // tiles.columns)
    if bias is not None:
        # Loaded without TMA, which alone would stop at the end of an array.
        bias = jnp.pad(bias, (0, lines * parts * tiles.columns - len(bias)))
    clusters = multiprocessors // tiles.cluster
    row_tiles = pl.cdiv(tokens, CONSUMERS * tiles.rows * tiles.cluster)
    plan = ProductPlan(
        tiles=tiles,
        block=block,
        fan=fan,
        columns=lines * parts,
        row_tiles=row_tiles,
        transposed=transposed,
        gelu=gelu,
        derivative=preactivation is not None,
        itemsize=jnp.dtype(dtype).itemsize,
    )
    elementwise = preactivation if residual is None else residual
    optional = [bias, elementwise]
    result = jax.ShapeDtypeStruct((tokens, columns), dtype)

    def body(index, slot, x, values, *more):
        refs = list(more)
        given = [refs.pop(0) if operand is not None else None for operand in optional]
        results = [refs.pop(0), refs.pop(0) if keep else None]
        arrays = _Arrays(index, slot, x, values, *given, *results)
        _kernel(plan, arrays, _Scratch(*refs))

    kernel = plgpu.kernel(
        body,
        out_type=[result] * (1 + keep),
        scratch_types=_scratch(plan, _slots(plan, elementwise is not None, keep), x.dtype, dtype),
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(tiles.cluster,),
        cluster_names=("member",),
        num_threads=CONSUMERS + 1,
        thread_name="group",
        kernel_name="block_sparse_input_gradient" if transposed else "block_sparse_matmul",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # Slices of results are written over what was read in them only where there is one.
            unsafe_no_auto_barriers=elementwise is None,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )
    operands = [operand for operand in optional if operand is not None]
    index, slot = (jnp.asarray(table).reshape(-1) for table in tables)
    return tuple(kernel(index, slot, x, values, *operands))


class _Arrays(NamedTuple):
    """Arrays in device memory."""

    index: Any
    slot: Any
    x: Any
    values: Any
    bias: Any
    elementwise: Any
    y: Any
    kept: Any


class _Scratch(NamedTuple):
    """Shared memory: the ring, its barriers, and slices of results on their way out."""

    x: Any
    block: Any
    full: Any
    empty: Any
    results: Any
    arrived: Any


def _slots(plan, elementwise, keep):
    """Slices of a consumer in shared memory; each tile's writes go round them whole times."""
    writes = len(plan.slices) * (1 + keep)
    most = writes if elementwise else plan.tiles.slices
    return max(slots for slots in range(1, most + 1) if writes % slots == 0)


def _scratch(plan, slots, dtype, result_dtype):
    tiles = plan.tiles
    # Copies of the lines' blocks end up one after another.
    shape: tuple[int, ...] = (tiles.columns, tiles.depth)
    if not plan.transposed:
        shape = (tiles.lines, tiles.depth, plan.share)
    stages = {"num_barriers": tiles.stages}
    empty: plgpu.ClusterBarrier | plgpu.Barrier
    if tiles.cluster > 1:
        empty = plgpu.ClusterBarrier(collective_axes=("member",), num_arrivals=CONSUMERS, **stages)
    else:
        empty = plgpu.Barrier(num_arrivals=CONSUMERS, **stages)
    return _Scratch(
        x=swizzled((tiles.stages, CONSUMERS * tiles.rows, tiles.depth), dtype),
        block=swizzled((tiles.stages, *shape), dtype),
        full=plgpu.Barrier(num_arrivals=1 + tiles.lines, **stages),
        empty=empty,
        results=swizzled((CONSUMERS, slots, SLICE_ROWS, plan.slice_columns), result_dtype),
        arrived=plgpu.Barrier(num_arrivals=len(plan.slices), num_barriers=CONSUMERS),
    )


def _kernel(plan, arrays, scratch):
    def consume(group):
        act = functools.partial(_consume, plan, arrays, scratch, group)
        _over_tiles(plan, arrays, act)

    def produce():
        return _over_tiles(plan, arrays, functools.partial(_produce, plan, arrays, scratch))

    run_groups(consume, produce, scratch.empty, plan.tiles.stages)


def _over_tiles(plan, arrays, act):
    """`act(row tile, column, stored blocks, first step)` on each tile; the steps of all."""

    def line_of(number):
        _, column = plan.place(lax.min(number, plan.total - 1))
        return lax.div(column, plan.parts)

    def last_of(number):
        return arrays.slot[(line_of(number) + 1) * plan.fan * plan.tiles.lines - 1]

    @plgpu.nd_loop(
        (plan.total,),
        collective_axes="cluster",
        init_carry=(jnp.int32(0), last_of(lax.axis_index("cluster"))),
    )
    def end(info, carry):
        (number,) = info.index
        step, last = carry
        # On its way while this tile is multiplied.
        following = last_of(number + lax.axis_size("cluster"))
        count = stored_of(arrays.slot, plan.fan, plan.tiles.lines, line_of(number), last)
        rows, column = plan.place(number)
        act(rows, column, count, step)
        return step + count * plan.steps, following

    return end[0]


def _first_row(plan, row_tile):
    tokens = CONSUMERS * plan.tiles.rows
    return (row_tile * plan.tiles.cluster + lax.axis_index("member")) * tokens


def _produce(plan, arrays, scratch, row_tile, column, count, first):
    tiles = plan.tiles
    rows = pl.ds(_first_row(plan, row_tile), CONSUMERS * tiles.rows)
    line = lax.div(column, plan.parts) * plan.fan
    side = pl.ds(lax.rem(column, plan.parts) * plan.share, plan.share)

    def loaded(position):
        """What the table says, on its way."""
        slots = [arrays.slot[position * tiles.lines + member] for member in range(tiles.lines)]
        return arrays.index[position], slots

    def entry(position, at):
        index, slots = at
        at = loaded(line + lax.min(position + 1, plan.fan - 1))
        for part in range(plan.steps):
            step = first + position * plan.steps + part
            stage = lax.rem(step, tiles.stages)
            depth = pl.ds(part * tiles.depth, tiles.depth)

            @pl.when(step >= tiles.stages)
            def _():
                plgpu.barrier_wait(scratch.empty.at[stage])  # noqa: B023

            plgpu.copy_gmem_to_smem(
                arrays.x.at[rows, pl.ds(index * plan.block + part * tiles.depth, tiles.depth)],
                scratch.x.at[stage],
                scratch.full.at[stage],
            )
            for member, slot in enumerate(slots):
                plgpu.copy_gmem_to_smem(
                    arrays.values.at[slot, *((side, depth) if plan.transposed else (depth, side))],
                    plan.of_line(scratch.block.at[stage], member),
                    scratch.full.at[stage],
                    collective_axes="member" if tiles.cluster > 1 else None,
                )
        return at

    lax.fori_loop(0, count, entry, loaded(line))


def _consume(plan, arrays, scratch, group, row_tile, column, count, first):
    tiles = plan.tiles
    row = _first_row(plan, row_tile) + group * tiles.rows
    first_column = column * tiles.columns
    steps = count * plan.steps
    results = scratch.results.at[group]

    def stage_of(step):
        return lax.rem(first + step, tiles.stages)

    def slice_of(array, place):
        rows, columns = place
        return array.at[
            pl.ds(row + rows, SLICE_ROWS),
            pl.ds(first_column + columns, plan.slice_columns),
        ]

    if arrays.elementwise is not None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for number, place in enumerate(plan.slices):
            plgpu.copy_gmem_to_smem(
                slice_of(arrays.elementwise, place), results.at[number], scratch.arrived.at[group]
            )

    @functools.partial(
        pl.run_scoped,
        sum_refs=[plgpu.ACC((tiles.rows, plan.piece), jnp.float32)] * plan.pieces,
    )
    def _(sum_refs):
        @pl.loop(0, steps)
        def _(step):
            stage = stage_of(step)
            plgpu.barrier_wait(scratch.full.at[stage])
            x = scratch.x.at[stage, pl.ds(group * tiles.rows, tiles.rows)]
            block = scratch.block.at[stage]
            for piece, sum_ref in enumerate(sum_refs):
                right = block.transpose((1, 0)) if plan.transposed else block.at[piece]
                plgpu.wgmma(sum_ref, x, right)
            plgpu.wgmma_wait(plan.pieces)

            # Those of the step before have read their stage.
            @pl.when(step > 0)
            def _():
                plgpu.barrier_arrive(scratch.empty.at[stage_of(step - 1)])

        totals = [sum_ref[...] for sum_ref in sum_refs]

        @pl.when(steps > 0)
        def _():
            plgpu.barrier_arrive(scratch.empty.at[stage_of(steps - 1)])

        if arrays.elementwise is not None:
            plgpu.barrier_wait(scratch.arrived.at[group])
        _finish(plan, arrays, results, slice_of, first_column, totals)


def _finish(plan, arrays, results, slice_of, first_column, totals):
    """Writes a consumer's sums: bias, activation, derivative, residual, in float32."""
    width = plan.slice_columns
    slots = results.shape[0]
    written = 0

    def write(array, place, value):
        nonlocal written
        slot = written % slots
        written += 1
        if arrays.elementwise is None:
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
        results[slot] = value.astype(results.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(results.at[slot], slice_of(array, place))

    for number, (row, column) in enumerate(plan.slices):
        piece, inside = divmod(column, plan.piece)
        part = totals[piece][row : row + SLICE_ROWS, inside : inside + width]
        if arrays.bias is not None:
            bias = plgpu.load(
                arrays.bias.at[pl.ds(first_column + column, width)],
                layout=plgpu.Layout.WGMMA.reduce(0),
                optimized=False,
            )
            part = part + lax.broadcast_in_dim(bias, part.shape, (1,))
        if arrays.kept is not None:
            write(arrays.kept, (row, column), part)
        if plan.gelu:
            part = value_and_derivative(part)[0]
        if arrays.elementwise is not None:
            other = results[number].astype(jnp.float32)
            part = part * value_and_derivative(other)[1] if plan.derivative else part + other
        write(arrays.y, (row, column), part)
