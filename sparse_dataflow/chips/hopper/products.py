"""y = xW and dx = dy Wᵀ on a Hopper GPU: a producer gathers by the table, two consumers multiply.

One persistent program per multiprocessor (or per cluster of two) processes tiles of the result,
[2 * rows tokens, columns], in turn.  Its producer warp group reads a line of the table and copies
each stored block, and the tokens' features that it multiplies, into a ring of stages.  Each of two
consumer warp groups multiplies half of the tokens by the block (wgmma), releases the stage, and
writes its results through shared memory.  The ring continues across tiles, so loads of the next
tile overlap with writes.  Only the ring synchronizes the consumers, so one can multiply while the
other writes.

The L2 cache bounds the rate.  A tile of t tokens and c columns reads 2 (t + c) bytes for t c
multiply-adds per feature.  With 256 tokens, at the full rate of the tensor cores, that is 48 bytes
per cycle and multiprocessor at block 128, as much as a dense 256 x 128 tile, and 80 at block 64.
Two merged lines of block 64 (`hopper.tables`) read as much as one line of block 128.  A
cluster of two shares each block by multicast, which leaves 40 and 72 bytes.  Tiles are ordered
column by column within a set of token tiles whose features fit half the L2 cache, so device memory
is read about once.

Shared memory bounds the rate too, at 128 bytes per cycle.  A wgmma m64nNk16 takes N / 2 cycles and
reads 64 x 16 numbers of its left operand and 16 x N of its right: 2048 + 32 N bytes.  TMA writes
each stage once: 48 bytes per cycle for 256 tokens and 128 columns.  With tokens as rows, m64n128k16
adds 96 bytes (at most 89% of the full rate).  The forward product of two merged lines of block 64
has m64n64k16, which adds 128 bytes (73%).  With features as rows, m64n256k16 would add 80 bytes
(100%); on an H100 both were within 4% (13B, block 128), so tokens are rows.

Two merged lines cannot share one m64n128k16.  Mosaic GPU (jax 0.12) does not take two blocks as one
operand [depth, 128]: a reshape of a transposed ref raises NotImplementedError.  It does not copy a
block into half of such an array either: `copy_gmem_to_smem` needs contiguous shared memory, so each
block would take eight copies.
"""

import functools
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sparse_dataflow.chips.hopper.memory import Ref, run_groups, swizzled
from sparse_dataflow.chips.hopper.plan import ProductPlan, count_stored
from sparse_dataflow.chips.hopper.tables import LineTables
from sparse_dataflow.chips.hopper.tuning import CONSUMERS, SLICE_ROWS, ProductTiles
from sparse_dataflow.core.ops.activation import value_and_derivative


def line_product(
    x: jax.Array,
    values: jax.Array,
    tables: LineTables,
    tiles: ProductTiles,
    *,
    transposed: bool,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    bias: jax.Array | None = None,
    activation: str | None = None,
    preactivation: jax.Array | None = None,
    with_preactivation: bool = False,
    columns: int,
    multiprocessors: int,
) -> tuple[jax.Array, ...]:
    """Multiply x by the stored blocks of each line.

    Args:
      x: bfloat16 [tokens, features].
      values: bfloat16 [nnz, block, block].
      tables: the lines, `tiles.lines` merged in each.
      tiles: the tile sizes.
      transposed: whether to transpose the blocks, as dx needs.
      dtype: dtype of the results.
      bias: float32 [columns], added to the product.
      activation: name of a fused one in `config.activations`, after the bias; None for none.
      preactivation: [tokens, columns] in the results' dtype; the product is multiplied by the
        activation's derivative there instead.  Excludes bias and with_preactivation.
      with_preactivation: whether to return the activation's input too.
      columns: width of the results, at most lines * width * block.
      multiprocessors: number of multiprocessors of the device.

    Returns:
      (y,) or (y, pre-activation), [tokens, columns].
    """
    tokens, block = len(x), values.shape[1]
    lines, fan = tables.index.shape
    # A block wider than a tile has several tile columns; merged lines are one.
    tiles_per_block = max(1, block // tiles.columns)
    if bias is not None:
        # The bias is loaded without TMA, so its reads must stay inside the array.
        bias = jnp.pad(bias, (0, lines * tiles_per_block * tiles.columns - len(bias)))
    clusters = multiprocessors // tiles.cluster
    row_tiles = pl.cdiv(tokens, CONSUMERS * tiles.rows * tiles.cluster)
    plan = ProductPlan(
        tiles=tiles,
        block=block,
        fan=fan,
        columns=lines * tiles_per_block,
        row_tiles=row_tiles,
        transposed=transposed,
        activation=activation,
        derivative=preactivation is not None,
        itemsize=jnp.dtype(dtype).itemsize,
    )
    optional = [bias, preactivation]
    result = jax.ShapeDtypeStruct((tokens, columns), dtype)

    def body(index, slot, x, values, *more):
        refs = list(more)
        bias_ref, before = (refs.pop(0) if operand is not None else None for operand in optional)
        y, after = refs.pop(0), refs.pop(0) if with_preactivation else None
        arrays = _Arrays(index, slot, x, values, bias_ref, before, y, after)
        scratch = _Scratch(*refs)
        acts = [functools.partial(act, plan, arrays, scratch) for act in (_consume, _produce)]
        over_tiles = functools.partial(_over_tiles, plan, arrays)
        run_groups(tiles.stages, scratch.empty, over_tiles, *acts)

    kernel = plgpu.kernel(
        body,
        out_type=[result] * (1 + with_preactivation),
        scratch_types=_scratch(plan, _slots(plan, with_preactivation), x.dtype, dtype),
        grid=(clusters,),
        grid_names=("cluster",),
        cluster=(tiles.cluster,),
        cluster_names=("member",),
        num_threads=CONSUMERS + 1,
        thread_name="group",
        kernel_name="block_sparse_input_gradient" if transposed else "block_sparse_matmul",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # Barriers are needed only where a result overwrites a slice that was read.
            unsafe_no_auto_barriers=preactivation is None,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )
    operands = [operand for operand in optional if operand is not None]
    index, slot = (jnp.asarray(table).reshape(-1) for table in tables)
    return tuple(kernel(index, slot, x, values, *operands))


class _Arrays(NamedTuple):
    """Arrays in device memory."""

    index: jax.Ref  # type: ignore[assignment]
    slot: jax.Ref
    x: jax.Ref
    values: jax.Ref
    bias: jax.Ref | None
    preactivation: jax.Ref | None
    y: jax.Ref
    preactivation_out: jax.Ref | None


class _Scratch(NamedTuple, Generic[Ref]):
    """Shared memory: the ring of stages, its barriers, and slices of outgoing results."""

    x: Ref
    block: Ref
    full: Ref
    empty: Ref
    results: Ref
    arrived: Ref


def _slots(plan, with_preactivation):
    """Return the slices of a consumer in shared memory; they divide the writes of a tile."""
    writes = len(plan.slices) * (1 + with_preactivation)
    most = writes if plan.derivative else plan.tiles.slices
    # Every tile then begins at the first slot again.
    return max(slots for slots in range(1, most + 1) if writes % slots == 0)


def _scratch(plan, slots, dtype, result_dtype):
    tiles = plan.tiles
    # The blocks of merged lines are consecutive.
    # Blocks arrive as they are stored: for dx that is [columns, depth], which wgmma transposes.
    shape: tuple[int, ...] = (tiles.columns, tiles.depth)
    if not plan.transposed:
        shape = (tiles.lines, tiles.depth, plan.line_columns)
    stages = {"num_barriers": tiles.stages}
    empty: plgpu.ClusterBarrier | plgpu.Barrier
    if tiles.cluster > 1:
        # Blocks are multicast to both members, so neither producer may fill a stage before the
        # consumers of both have read it.
        empty = plgpu.ClusterBarrier(collective_axes=("member",), num_arrivals=CONSUMERS, **stages)
    else:
        empty = plgpu.Barrier(num_arrivals=CONSUMERS, **stages)
    return _Scratch(
        x=swizzled((tiles.stages, CONSUMERS * tiles.rows, tiles.depth), dtype),
        block=swizzled((tiles.stages, *shape), dtype),
        # One arrival for the features, and one for the block of each merged line.
        full=plgpu.Barrier(num_arrivals=1 + tiles.lines, **stages),
        empty=empty,
        results=swizzled((CONSUMERS, slots, SLICE_ROWS, plan.slice_columns), result_dtype),
        arrived=plgpu.Barrier(num_arrivals=len(plan.slices), num_barriers=CONSUMERS),
    )


def _over_tiles(plan, arrays, act):
    """Call `act(row tile, column, stored blocks, first step)` on each tile; return all steps."""

    def line_of(number):
        # The prefetch of the last tiles asks past the end; it may read any line.
        _, column = plan.place(lax.min(number, plan.total - 1))
        return lax.div(column, plan.tiles_per_block)

    def last_slot(number):
        # -1 if the line is shorter than the table, whose padding is at the end of a line.
        return arrays.slot[(line_of(number) + 1) * plan.fan * plan.tiles.lines - 1]

    @plgpu.nd_loop(
        (plan.total,),
        collective_axes="cluster",
        init_carry=(jnp.int32(0), last_slot(lax.axis_index("cluster"))),
    )
    def final_carry(info, carry):
        (number,) = info.index
        step, last = carry
        # Prefetch, which overlaps with the products of this tile.
        following = last_slot(number + lax.axis_size("cluster"))
        count = count_stored(arrays.slot, plan.fan, plan.tiles.lines, line_of(number), last)
        rows, column = plan.place(number)
        act(rows, column, count, step)
        # Producer and consumers count the steps alike, so they agree on stages without a message.
        return step + count * plan.steps, following

    return final_carry[0]


def _first_row(plan, row_tile):
    tokens = CONSUMERS * plan.tiles.rows
    return (row_tile * plan.tiles.cluster + lax.axis_index("member")) * tokens


def _produce(plan, arrays, scratch, row_tile, column, count, first):
    tiles = plan.tiles
    rows = pl.ds(_first_row(plan, row_tile), CONSUMERS * tiles.rows)
    line = lax.div(column, plan.tiles_per_block) * plan.fan
    side = pl.ds(lax.rem(column, plan.tiles_per_block) * plan.line_columns, plan.line_columns)

    def load_entry(position):
        """Load a position's table entries."""
        slots = [arrays.slot[position * tiles.lines + member] for member in range(tiles.lines)]
        return arrays.index[position], slots

    def copy_position(position, at):
        index, slots = at
        # The next entry is loaded now: its latency hides behind the copies of this one.
        at = load_entry(line + lax.min(position + 1, plan.fan - 1))
        for k in range(plan.steps):
            step = first + position * plan.steps + k
            stage = lax.rem(step, tiles.stages)
            depth = pl.ds(k * tiles.depth, tiles.depth)

            # The first round fills the ring; later a stage must have been read before.
            @pl.when(step >= tiles.stages)
            def _():
                plgpu.barrier_wait(scratch.empty.at[stage])  # noqa: B023

            plgpu.copy_gmem_to_smem(
                arrays.x.at[rows, pl.ds(index * plan.block + k * tiles.depth, tiles.depth)],
                scratch.x.at[stage],
                scratch.full.at[stage],
            )
            for member, slot in enumerate(slots):
                plgpu.copy_gmem_to_smem(
                    arrays.values.at[slot, *((side, depth) if plan.transposed else (depth, side))],
                    plan.line_block(scratch.block.at[stage], member),
                    scratch.full.at[stage],
                    collective_axes="member" if tiles.cluster > 1 else None,
                )
        return at

    lax.fori_loop(0, count, copy_position, load_entry(line))


def _consume(plan, arrays, scratch, consumer, row_tile, column, count, first):
    tiles = plan.tiles
    row, first_column = plan.first_result(consumer)
    row += _first_row(plan, row_tile)
    first_column += column * tiles.columns
    steps = count * plan.steps
    results = scratch.results.at[consumer]

    def stage_of(step):
        return lax.rem(first + step, tiles.stages)

    def slice_of(array, place):
        rows, columns = place
        return array.at[
            pl.ds(row + rows, SLICE_ROWS),
            pl.ds(first_column + columns, plan.slice_columns),
        ]

    if plan.derivative:
        # The pre-activation comes into the slices of results, which the tile before must have left.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for number, place in enumerate(plan.slices):
            plgpu.copy_gmem_to_smem(
                slice_of(arrays.preactivation, place),
                results.at[number],
                scratch.arrived.at[consumer],
            )

    @functools.partial(
        pl.run_scoped,
        sum_refs=[plgpu.ACC(plan.sum_shape, jnp.float32)] * plan.num_sums,
    )
    def _(sum_refs):
        @pl.loop(0, steps)
        def _(step):
            stage = stage_of(step)
            plgpu.barrier_wait(scratch.full.at[stage])
            block = scratch.block.at[stage]
            x = scratch.x.at[stage, pl.ds(consumer * tiles.rows, tiles.rows)]
            for number, sum_ref in enumerate(sum_refs):
                right = block.transpose((1, 0)) if plan.transposed else block.at[number]
                plgpu.wgmma(sum_ref, x, right)
            plgpu.wgmma_wait(plan.num_sums)

            # The previous step's wgmma has read its stage.
            @pl.when(step > 0)
            def _():
                plgpu.barrier_arrive(scratch.empty.at[stage_of(step - 1)])

        totals = [sum_ref[...] for sum_ref in sum_refs]

        @pl.when(steps > 0)
        def _():
            plgpu.barrier_arrive(scratch.empty.at[stage_of(steps - 1)])

        if plan.derivative:
            plgpu.barrier_wait(scratch.arrived.at[consumer])
        _finish(plan, arrays, results, slice_of, first_column, totals)


def _finish(plan, arrays, results, slice_of, first_column, totals):
    """Apply bias, activation and derivative in float32, and write a consumer's sums."""
    width = plan.slice_columns
    slots = results.shape[0]
    written = 0

    def write(array, place, value):
        nonlocal written
        slot = written % slots
        written += 1
        # With a derivative every slice has its slot (`_slots`), which no other write uses.
        if not plan.derivative:
            # At most slots - 1 copies are still reading, so that of this slot is done.
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
        results.at[slot][...] = value.astype(results.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(results.at[slot], slice_of(array, place))

    for number, (row, column) in enumerate(plan.slices):
        sum_index, inside = divmod(column, plan.sum_columns)
        value = totals[sum_index][row : row + SLICE_ROWS, inside : inside + width]
        if arrays.bias is not None:
            bias = plgpu.load(
                arrays.bias.at[pl.ds(first_column + column, width)],
                layout=plgpu.Layout.WGMMA.reduce(0),
                optimized=False,
            )
            value = value + lax.broadcast_in_dim(bias, value.shape, (1,))
        if arrays.preactivation_out is not None:
            write(arrays.preactivation_out, (row, column), value)
        if plan.derivative:
            # The slice has the pre-activation, and gets the result below.
            before = results.at[number][...].astype(jnp.float32)
            value = value * value_and_derivative(plan.activation, before)[1]
        elif plan.activation is not None:
            value = value_and_derivative(plan.activation, value)[0]
        write(arrays.y, (row, column), value)
