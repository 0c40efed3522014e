"""The kernel of dW on a Hopper GPU: a producer gathers by the table, two consumers multiply."""

import functools
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from sparse_dataflow.chips.hopper.memory import Ref, run_groups, swizzled
from sparse_dataflow.chips.hopper.results import Results
from sparse_dataflow.chips.hopper.tables import LineTables
from sparse_dataflow.chips.hopper.tuning import CONSUMERS, SLICE_ROWS, GradientTiles


class GradientPlan(NamedTuple):
    """The static shape of the kernel.

    Attributes:
      tiles: the tile sizes.
      block: side of a block.
      columns: block columns; merged columns count once.
      stored: number of stored blocks.
      fan: positions of a column.
      steps: pipeline stages of one split of the tokens.
      first_pair: the first pair of units to sum.
      pairs: number of pairs to sum.
      splits: splits of the tokens, summed separately.
      partial: whether to write partial sums consecutively instead of to their blocks' slots.
    """

    tiles: GradientTiles
    block: int
    columns: int
    fan: int
    stored: int
    steps: int
    first_pair: int
    pairs: int
    splits: int = 1
    partial: bool = False

    @property
    def tiles_per_side(self):
        """Tiles along a block's side."""
        return self.block // self.side

    @property
    def units_per_column(self):
        """Units of a column, in whole blocks; an even number for merged columns."""
        units = pl.cdiv(self.fan, self.tiles.width)
        return units if self.tiles.lines == 1 else units + units % CONSUMERS

    @property
    def width(self):
        """Columns of a sum."""
        return self.side * self.tiles.lines

    @property
    def units(self):
        """Units of all columns."""
        return self.columns * self.units_per_column * self.tiles_per_side**2

    @property
    def first_block(self):
        """Blocks before the first pair, including padding."""
        return self.first_pair * CONSUMERS // self.tiles_per_side**2 * self.tiles.width

    @property
    def blocks(self):
        """Blocks from the first pair to the last, including padding."""
        last = min(self.units, (self.first_pair + self.pairs) * CONSUMERS)
        return pl.cdiv(last, self.tiles_per_side**2) * self.tiles.width - self.first_block

    @property
    def side(self):
        """Side of a tile of a block."""
        return min(self.block, self.tiles.side)

    @property
    def rows(self):
        """Rows of a tile's sum."""
        return max(self.side, SLICE_ROWS)

    @property
    def height(self):
        """Rows of a tile in a slice of results."""
        return min(self.side, SLICE_ROWS)

    def x_tile(self, index, tile_row):
        """Return (first column of x, first row among the sums) of a tile of a block row."""
        column = index * self.block + tile_row * self.side
        # wgmma has at least 64 rows.  A smaller tile is multiplied with its neighbours, from a
        # multiple of 64 on, and begins at `offset` among the sums.
        if self.side == self.rows:
            return column, 0
        offset = pl.multiple_of(lax.rem(column, self.rows), self.side)
        return column - offset, offset


def unit_sums(
    x: jax.Array,
    dy: jax.Array,
    tables: LineTables,
    plan: GradientPlan,
    result: jax.ShapeDtypeStruct,
    *,
    multiprocessors: int,
) -> jax.Array:
    """Compute xᵀ dy at the blocks of the plan's pairs of units; see `gradient.line_gradient`.

    The result is [nnz, block, block] by slot, or [splits * blocks, block, block] with
    `plan.partial`.  Blocks outside the plan's pairs are undefined.
    """

    def body(index, slot, x, dy, out, *refs):
        arrays, scratch = _Arrays(index, slot, x, dy, out), _Scratch(*refs)
        acts = [functools.partial(act, plan, arrays, scratch) for act in (_consume, _produce)]
        over_pairs = functools.partial(_over_pairs, plan, arrays)
        run_groups(plan.tiles.stages, scratch.empty, over_pairs, *acts)

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
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )
    index, slot = (jnp.asarray(table).reshape(-1) for table in tables)
    return kernel(index, slot, x, dy)


class _Arrays(NamedTuple):
    """Arrays in device memory."""

    index: jax.Ref  # type: ignore[assignment]
    slot: jax.Ref
    x: jax.Ref
    dy: jax.Ref
    out: jax.Ref


class _Scratch(NamedTuple, Generic[Ref]):
    """Shared memory: the ring of stages, its barriers, and slices of outgoing results."""

    x: Ref
    dy: Ref
    full: Ref
    empty: Ref
    results: Ref


def _scratch(plan, dtype, result_dtype):
    tiles = plan.tiles
    stages = {"num_barriers": tiles.stages}
    width = min(plan.side, tiles.slice_bytes // result_dtype.itemsize)
    # The slots must divide a unit's slices, so that every unit starts at the first slot.
    slices = tiles.width * (plan.rows // SLICE_ROWS) * (plan.width // width)
    slots = max(slots for slots in range(1, tiles.slices + 1) if slices % slots == 0)
    rows = (tiles.stages, CONSUMERS, tiles.width, tiles.depth, plan.rows)
    return _Scratch(
        x=swizzled(rows, dtype, plan.side),  # wgmma needs equally swizzled operands.
        dy=swizzled((tiles.stages, CONSUMERS, tiles.depth, plan.width), dtype, plan.side),
        full=plgpu.Barrier(num_arrivals=CONSUMERS * (tiles.width + 1), **stages),
        empty=plgpu.Barrier(num_arrivals=CONSUMERS, **stages),
        results=swizzled((CONSUMERS, slots, SLICE_ROWS, width), result_dtype),
    )


class _Unit(NamedTuple):
    """The work of one consumer.

    Attributes:
      column: the (merged) block column.
      slot: slot of each block, -1 if it is not stored; merged lines are consecutive.
      target: index in the result of each slot.
      tile_row: row of the tile inside its block.
      tile_column: column of the tile inside its block.
    """

    column: jax.Array
    block_rows: list
    slot: list
    target: list
    tile_row: jax.Array
    tile_column: jax.Array


def _over_pairs(plan, arrays, act):
    """Call `act(split, units of the pair, first step)` on each nonempty pair; return all steps."""

    def locate_unit(number):
        """Return (column, first position, tile of a block) of a unit.

        Merged columns are shorter than their tables, so units alternate between columns: stored
        positions come first and are spread evenly.
        """
        if plan.tiles.lines > 1:
            pair, unit = lax.div(number, CONSUMERS), lax.rem(number, CONSUMERS)
            turn, column = lax.div(pair, plan.columns), lax.rem(pair, plan.columns)
            return column, (turn * CONSUMERS + unit) * plan.tiles.width, jnp.int32(0)
        tiles, units = plan.tiles_per_side**2, plan.units_per_column
        unit, tile = lax.div(number, tiles), lax.rem(number, tiles)
        column, row_unit = lax.div(unit, units), lax.rem(unit, units)
        # The prefetch asks for units past the end.
        return lax.min(column, plan.columns - 1), row_unit * plan.tiles.width, tile

    def load_entries(item):
        """Load the table entries of a pair's blocks."""
        first = (plan.first_pair + lax.div(item, plan.splits)) * CONSUMERS
        entries = []
        for unit in range(CONSUMERS):
            column, position, _ = locate_unit(first + unit)
            for place in range(plan.tiles.width):
                at = column * plan.fan + lax.min(position + place, plan.fan - 1)
                first_slot = at * plan.tiles.lines
                index = arrays.index[at]
                slots = [arrays.slot[first_slot + line] for line in range(plan.tiles.lines)]
                entries.append((index, slots))
        return entries

    def build_pair(item, entries):
        first = (plan.first_pair + lax.div(item, plan.splits)) * CONSUMERS
        offset = lax.rem(item, plan.splits) * plan.blocks - plan.first_block
        pair = []
        for number in range(CONSUMERS):
            column, position, tile = locate_unit(first + number)
            # If the number of units is odd, the last pair's second unit is empty.
            inside = first + number < plan.units
            rows, slots = zip(*entries[number * plan.tiles.width :][: plan.tiles.width])
            slot = [
                lax.select(inside & (position + place < plan.fan), slot, -1)
                for place, merged_slots in enumerate(slots)
                for slot in merged_slots
            ]
            target = slot
            if plan.partial:
                block = lax.div(first + number, plan.tiles_per_side**2) * plan.tiles.width
                target = [offset + block + place for place in range(plan.tiles.width)]
            tile_row = lax.rem(tile, plan.tiles_per_side)
            tile_column = lax.div(tile, plan.tiles_per_side)
            pair.append(_Unit(column, list(rows), slot, target, tile_row, tile_column))
        return pair

    @plgpu.nd_loop(
        (plan.pairs * plan.splits,),
        collective_axes="program",
        init_carry=(jnp.int32(0), load_entries(lax.axis_index("program"))),
    )
    def final_carry(info, carry):
        (item,) = info.index
        step, entries = carry
        # Prefetch, which overlaps with the products of this pair.
        following = load_entries(item + lax.axis_size("program"))
        pair = build_pair(item, entries)
        # The stored positions of a column are first, so a unit without its first block has none.
        any_stored = (pair[0].slot[0] >= 0) | (pair[1].slot[0] >= 0)

        @pl.when(any_stored)
        def _():
            act(lax.rem(item, plan.splits), pair, step)

        return step + lax.select(any_stored, plan.steps, 0), following

    return final_carry[0]


def _shared(pair):
    """Return whether both units read the same columns of dy."""
    first, second = pair
    return (first.column == second.column) & (first.tile_column == second.tile_column)


def _produce(plan, arrays, scratch, split, pair, first):
    tiles, side = plan.tiles, plan.side
    shared = _shared(pair)

    @pl.loop(0, plan.steps)
    def _(k):
        step = first + k
        stage = lax.rem(step, tiles.stages)
        tokens = pl.ds((split * plan.steps + k) * tiles.depth, tiles.depth)

        @pl.when(step >= tiles.stages)
        def _():
            plgpu.barrier_wait(scratch.empty.at[stage])

        def copy_dy(place):
            unit = pair[place]
            first_column = unit.column * plan.tiles.lines * plan.block
            columns = pl.ds(first_column + unit.tile_column * side, plan.width)
            plgpu.copy_gmem_to_smem(
                arrays.dy.at[tokens, columns], scratch.dy.at[stage, place], scratch.full.at[stage]
            )

        copy_dy(0)

        @pl.when(shared)
        def _():
            # The barrier counts two copies of dy: the producer arrives in place of the second.
            plgpu.barrier_arrive(scratch.full.at[stage])

        @pl.when(jnp.logical_not(shared))
        def _():
            copy_dy(1)

        for place, unit in enumerate(pair):
            for number, index in enumerate(unit.block_rows):
                row, _ = plan.x_tile(index, unit.tile_row)
                plgpu.copy_gmem_to_smem(
                    arrays.x.at[tokens, pl.ds(row, plan.rows)],
                    scratch.x.at[stage, place, number],
                    scratch.full.at[stage],
                )


def _consume(plan, arrays, scratch, consumer, split, pair, first):
    del split
    tiles = plan.tiles
    # Both consumers run one program, and select their unit.
    unit = jax.tree.map(lambda a, b: lax.select(consumer == 0, a, b), *pair)
    # A dy that both units read was copied to the first place alone.
    which = lax.select(_shared(pair), 0, consumer)

    def stage_of(step):
        return lax.rem(first + step, tiles.stages)

    results = Results(plan, arrays, scratch, consumer, unit)
    present = unit.slot[0] >= 0

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
                # dW = x^T dy: tokens, the rows of both operands, are the contraction.
                x = scratch.x.at[stage, consumer, number]
                plgpu.wgmma(sum_ref, x.transpose((1, 0)), scratch.dy.at[stage, which])
            plgpu.wgmma_wait(tiles.width)

            # The previous step's wgmma has read its stage.
            @pl.when(step > 0)
            def _():
                plgpu.barrier_arrive(scratch.empty.at[stage_of(step - 1)])

        totals = [sum_ref[...] for sum_ref in sum_refs]
        plgpu.barrier_arrive(scratch.empty.at[stage_of(plan.steps - 1)])

        @pl.when(present)
        def _():
            results.write(totals)
