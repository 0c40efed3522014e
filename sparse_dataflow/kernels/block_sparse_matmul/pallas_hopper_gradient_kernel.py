"""The kernel of dW on a Hopper GPU: a producer follows the table, two consumers multiply."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sparse_dataflow.kernels.block_sparse_matmul.pallas_hopper_memory import run_groups, swizzled
from sparse_dataflow.kernels.block_sparse_matmul.pallas_hopper_results import Results
from sparse_dataflow.kernels.block_sparse_matmul.pallas_hopper_tables import LineTables
from sparse_dataflow.kernels.block_sparse_matmul.tuning_hopper import (
    CONSUMERS,
    SLICE_ROWS,
    GradientTiles,
)


class GradientPlan(NamedTuple):
    """What is fixed when the kernel is traced.

    Attributes:
      tiles: the tile sizes.
      block: side of a block.
      columns: block columns, several side by side counted once.
      stored: number of stored blocks.
      fan: positions of a column.
      steps: stages of a share of the tokens.
      first: the first pair of units that is summed.
      pairs: how many are.
      shares: shares of the tokens, summed apart.
      apart: whether the sums are written one after another, and not to their blocks' slots.
    """

    tiles: GradientTiles
    block: int
    columns: int
    fan: int
    stored: int
    steps: int
    first: int
    pairs: int
    shares: int = 1
    apart: bool = False

    @property
    def parts(self):
        """Tiles along the side of a block."""
        return self.block // self.side

    @property
    def groups(self):
        """Units of a column, of whole blocks; whole pairs where columns lie side by side."""
        groups = pl.cdiv(self.fan, self.tiles.width)
        return groups if self.tiles.lines == 1 else groups + groups % CONSUMERS

    @property
    def width(self):
        """Columns of a sum."""
        return self.side * self.tiles.lines

    @property
    def units(self):
        """Units of all columns."""
        return self.columns * self.groups * self.parts**2

    @property
    def first_block(self):
        """Blocks, with those that columns lack, before the first pair."""
        return self.first * CONSUMERS // self.parts**2 * self.tiles.width

    @property
    def blocks(self):
        """Blocks, with those that columns lack, from the first pair to the last."""
        last = min(self.units, (self.first + self.pairs) * CONSUMERS)
        return pl.cdiv(last, self.parts**2) * self.tiles.width - self.first_block

    @property
    def side(self):
        """Side of what is copied of a block."""
        return min(self.block, self.tiles.side)

    @property
    def rows(self):
        """Rows of a block's sum."""
        return max(self.side, SLICE_ROWS)

    @property
    def height(self):
        """Rows of a block in a slice of results."""
        return min(self.side, SLICE_ROWS)

    def row_of(self, index, part):
        """(first column of x, first row among the sums) of a tile of a block row."""
        row = index * self.block + part * self.side
        above = pl.multiple_of(lax.rem(row, self.rows), self.side) if self.side < self.rows else 0
        return row - above, above


def unit_sums(
    x: jax.Array,
    dy: jax.Array,
    tables: LineTables,
    plan: GradientPlan,
    result: jax.ShapeDtypeStruct,
    accumulator: jax.Array | None = None,
    *,
    multiprocessors: int,
) -> jax.Array:
    """xᵀ dy at the blocks of the plan's pairs of units.

    Args:
      x: bfloat16 [tokens, in_features].
      dy: bfloat16 [tokens, out_features].
      tables: the columns, as many side by side as the tiles have.
      plan: which pairs.
      result: [nnz, block, block] by slot, or [shares * blocks, block, block] with `apart`; of
        blocks that are not summed here, undefined.
      accumulator: float32 of the result's shape, added to the sums.
      multiprocessors: of the device.
    """

    def body(index, slot, x, dy, *more):
        refs = list(more)
        before = None if accumulator is None else refs.pop(0)
        arrays = _Arrays(index, slot, x, dy, before, refs.pop(0))
        _kernel(plan, arrays, _Scratch(*refs))

    kernel = plgpu.kernel(
        body,
        out_type=result,
        scratch_types=_scratch(plan, x.dtype, jnp.dtype(result.dtype)),
        grid=(multiprocessors,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="group",
        kernel_name="block_sparse_weight_gradient",
        compiler_params=plgpu.CompilerParams(
            # Slices of results are written over what was read in them only where there is one.
            unsafe_no_auto_barriers=accumulator is None,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )
    before = [] if accumulator is None else [accumulator]
    index, slot = (jnp.asarray(table).reshape(-1) for table in tables)
    return kernel(index, slot, x, dy, *before)


class _Arrays(NamedTuple):
    """Arrays in device memory."""

    index: Any
    slot: Any
    x: Any
    dy: Any
    before: Any
    out: Any


class _Scratch(NamedTuple):
    """Shared memory: the ring, its barriers, and slices of results on their way out."""

    x: Any
    dy: Any
    full: Any
    empty: Any
    results: Any
    arrived: Any


def _scratch(plan, dtype, result_dtype):
    tiles = plan.tiles
    stages = {"num_barriers": tiles.stages}
    width = min(plan.side, tiles.slice_bytes // result_dtype.itemsize)
    # A unit's slices go round the places in shared memory whole times.
    slices = tiles.width * (plan.rows // SLICE_ROWS) * (plan.width // width)
    slots = max(slots for slots in range(1, tiles.slices + 1) if slices % slots == 0)
    rows = (tiles.stages, CONSUMERS, tiles.width, tiles.depth, plan.rows)
    return _Scratch(
        x=swizzled(rows, dtype, plan.side),  # wgmma wants both operands swizzled alike.
        dy=swizzled((tiles.stages, CONSUMERS, tiles.depth, plan.width), dtype, plan.side),
        full=plgpu.Barrier(num_arrivals=CONSUMERS * (tiles.width + 1), **stages),
        empty=plgpu.Barrier(num_arrivals=CONSUMERS, **stages),
        results=swizzled((CONSUMERS, slots, SLICE_ROWS, width), result_dtype),
        arrived=plgpu.Barrier(num_barriers=(CONSUMERS, slots)),
    )


class _Unit(NamedTuple):
    """One consumer's share: block rows, where their blocks go (each row's side by side), and which
    tile of them."""

    column: Any
    block_rows: list
    slot: list
    target: list
    row_part: Any
    column_part: Any


def _kernel(plan, arrays, scratch):
    def consume(group):
        act = functools.partial(_consume, plan, arrays, scratch, group)
        _over_pairs(plan, arrays, act)

    def produce():
        return _over_pairs(plan, arrays, functools.partial(_produce, plan, arrays, scratch))

    run_groups(consume, produce, scratch.empty, plan.tiles.stages)


def _over_pairs(plan, arrays, act):
    """`act(share of the tokens, units of the pair, first step)` on each pair that is not empty;
    the steps of all."""

    def place_of(number):
        """(column, first position, tile of a block) of a unit.

        Side by side, columns are short of the tables' width, and all take turns: what is stored
        comes first, in equal shares.
        """
        if plan.tiles.lines > 1:
            pair, unit = lax.div(number, CONSUMERS), lax.rem(number, CONSUMERS)
            turn, column = lax.div(pair, plan.columns), lax.rem(pair, plan.columns)
            return column, (turn * CONSUMERS + unit) * plan.tiles.width, jnp.int32(0)
        unit, part = lax.div(number, plan.parts**2), lax.rem(number, plan.parts**2)
        column, group = lax.div(unit, plan.groups), lax.rem(unit, plan.groups)
        return lax.min(column, plan.columns - 1), group * plan.tiles.width, part

    def loads_of(item):
        """What the table says of a pair's blocks, on its way."""
        first = (plan.first + lax.div(item, plan.shares)) * CONSUMERS
        loads = []
        for unit in range(CONSUMERS):
            column, position, _ = place_of(first + unit)
            for place in range(plan.tiles.width):
                at = column * plan.fan + lax.min(position + place, plan.fan - 1)
                own = [at * plan.tiles.lines + line for line in range(plan.tiles.lines)]
                loads.append((arrays.index[at], [arrays.slot[place] for place in own]))
        return loads

    def pair_of(item, loads):
        first = (plan.first + lax.div(item, plan.shares)) * CONSUMERS
        before = lax.rem(item, plan.shares) * plan.blocks - plan.first_block
        pair = []
        for number in range(CONSUMERS):
            column, position, part = place_of(first + number)
            # An odd number leaves the last pair one unit; the other is empty.
            inside = first + number < plan.units
            rows, slots = zip(*loads[number * plan.tiles.width :][: plan.tiles.width])
            slot = [
                lax.select(inside & (position + place < plan.fan), slot, -1)
                for place, side_by_side in enumerate(slots)
                for slot in side_by_side
            ]
            target = slot
            if plan.apart:
                block = lax.div(first + number, plan.parts**2) * plan.tiles.width
                target = [before + block + place for place in range(plan.tiles.width)]
            row_part, column_part = lax.rem(part, plan.parts), lax.div(part, plan.parts)
            pair.append(_Unit(column, list(rows), slot, target, row_part, column_part))
        return pair

    @plgpu.nd_loop(
        (plan.pairs * plan.shares,),
        collective_axes="program",
        init_carry=(jnp.int32(0), loads_of(lax.axis_index("program"))),
    )
    def end(info, carry):
        (item,) = info.index
        step, loads = carry
        # On its way while this pair is multiplied.
        following = loads_of(item + lax.axis_size("program"))
        pair = pair_of(item, loads)
        some = (pair[0].slot[0] >= 0) | (pair[1].slot[0] >= 0)

        @pl.when(some)
        def _():
            act(lax.rem(item, plan.shares), pair, step)

        return step + lax.select(some, plan.steps, 0), following

    return end[0]


def _shared(pair):
    """Whether both units multiply the same columns of dy."""
    first, second = pair
    return (first.column == second.column) & (first.column_part == second.column_part)


def _produce(plan, arrays, scratch, share, pair, first):
    tiles, side = plan.tiles, plan.side
    shared = _shared(pair)

    @pl.loop(0, plan.steps)
    def _(part):
        step = first + part
        stage = lax.rem(step, tiles.stages)
        tokens = pl.ds((share * plan.steps + part) * tiles.depth, tiles.depth)

        @pl.when(step >= tiles.stages)
        def _():
            plgpu.barrier_wait(scratch.empty.at[stage])

        def copy_dy(place):
            unit = pair[place]
            first_column = unit.column * plan.tiles.lines * plan.block
            columns = pl.ds(first_column + unit.column_part * side, plan.width)
            plgpu.copy_gmem_to_smem(
                arrays.dy.at[tokens, columns], scratch.dy.at[stage, place], scratch.full.at[stage]
            )

        copy_dy(0)

        @pl.when(shared)
        def _():
            plgpu.barrier_arrive(scratch.full.at[stage])

        @pl.when(jnp.logical_not(shared))
        def _():
            copy_dy(1)

        for place, unit in enumerate(pair):
            for number, index in enumerate(unit.block_rows):
                row, _ = plan.row_of(index, unit.row_part)
                plgpu.copy_gmem_to_smem(
                    arrays.x.at[tokens, pl.ds(row, plan.rows)],
                    scratch.x.at[stage, place, number],
                    scratch.full.at[stage],
                )


def _consume(plan, arrays, scratch, group, share, pair, first):
    del share
    tiles = plan.tiles
    unit = jax.tree.map(lambda a, b: lax.select(group == 0, a, b), *pair)
    which = lax.select(_shared(pair), 0, group)

    def stage_of(step):
        return lax.rem(first + step, tiles.stages)

    results = Results(plan, arrays, scratch, group, unit)
    present = unit.slot[0] >= 0
    pl.when(present)(results.begin)

    @functools.partial(
        pl.run_scoped,
        sum_refs=[plgpu.ACC((plan.rows, plan.width), jnp.float32)] * tiles.width,
    )
    def _(sum_refs):
        @pl.loop(0, plan.steps)
        def _(step):
            stage = stage_of(step)
            plgpu.barrier_wait(scratch.full.at[stage])
            for number, sum_ref in enumerate(sum_refs):
                x = scratch.x.at[stage, group, number]
                plgpu.wgmma(sum_ref, x.transpose((1, 0)), scratch.dy.at[stage, which])
            plgpu.wgmma_wait(tiles.width)

            # Those of the step before have read their stage.
            @pl.when(step > 0)
            def _():
                plgpu.barrier_arrive(scratch.empty.at[stage_of(step - 1)])

        totals = [sum_ref[...] for sum_ref in sum_refs]
        plgpu.barrier_arrive(scratch.empty.at[stage_of(plan.steps - 1)])

        @pl.when(present)
        def _():
            results.write(totals)
