"""y = xW and dx = dy Wᵀ on a TPU: whole rows of a tile of tokens in VMEM, weights streaming by.

Grid: (cores, token tiles, groups of result columns), columns innermost.  The operand's rows stay
in VMEM while every result column reads the tiles it needs from them, so x is read from HBM once
and each stored block once a token tile (its arithmetic intensity is the token tile).  The next
token tile and the next step's blocks are on their way meanwhile, in a second buffer each; the
blocks come straight from their slots, so that neither padding nor a transposed or dense copy of
the weights exists.  The pipeline of Pallas writes the results.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparse_dataflow.kernels.block_sparse_matmul import pallas_tpu_tables
from sparse_dataflow.kernels.block_sparse_matmul.tuning import ProductTiles
from sparse_dataflow.kernels.gelu.api import value_and_derivative


def precision(dtype):
    """Float32 products in full precision; the matrix unit would round to bfloat16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def line_product(
    x: jax.Array,
    values: jax.Array,
    tables: pallas_tpu_tables.TileTables,
    tiles: ProductTiles,
    *,
    transposed: bool,
    bias: jax.Array | None = None,
    gelu: bool = False,
    residual: jax.Array | None = None,
    keep: bool = False,
    vmem_bytes: int,
    cores: int,
    interpret=False,
) -> tuple[jax.Array, ...]:
    """x times the stored blocks of each line.

    Args:
      x: [tokens, features], both multiples of the smallest tile (`pallas_tpu` pads).
      values: [nnz, block, block].
      tables: the lines, by result column.
      tiles: the tile sizes.
      transposed: whether the blocks are used transposed, as dx does.
      bias: float32 [1, lines * tile], added to the product.
      gelu: whether the sum passes a GELU.
      residual: [tokens, lines * tile], added last.
      keep: whether what enters the GELU is a second result.
      vmem_bytes: VMEM limit of the kernel.
      cores: cores to spread the token tiles over.
      interpret: as in `pl.pallas_call`.

    Returns:
      (y,) or (y, pre-activation), each [tokens, lines * tile] in x's dtype.
    """
    lines, _, ratio, _ = tables.position.shape
    block = values.shape[1]
    tile = ratio * block
    steps = pl.cdiv(lines, tiles.lines)
    token_tiles = pl.cdiv(len(x), tiles.tokens)
    cores = cores if token_tiles % cores == 0 else 1
    tables = pallas_tpu_tables.padded(tables, tiles.lines, tiles.entries)
    own = token_tiles // cores
    wide = pl.BlockSpec(
        (tiles.tokens, tiles.lines * tile), lambda core, i, step, *_: (core * own + i, step)
    )
    flat = pl.BlockSpec((1, tiles.lines * tile), lambda core, i, step, *_: (0, step))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    operands = [(x, anywhere), (values, anywhere), (bias, flat), (residual, wide)]
    operands = [(array, spec) for array, spec in operands if array is not None]
    result = jax.ShapeDtypeStruct((len(x), lines * tile), x.dtype)
    blocks = tables.slot.shape[1]
    scratch = [
        pltpu.VMEM((2, tiles.tokens, x.shape[1]), x.dtype),
        pltpu.VMEM((2, tiles.lines, blocks, block, block), values.dtype),
        pltpu.VMEM((tiles.tokens, tile), jnp.float32),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((2,)),
    ]
    if ratio > 1:
        scratch.append(pltpu.VMEM((tiles.entries, tile, tile), values.dtype))
    kernel = functools.partial(
        _kernel,
        tiles=tiles,
        tokens=len(x),
        ratio=ratio,
        transposed=transposed,
        has_bias=bias is not None,
        gelu=gelu,
        has_residual=residual is not None,
        keep=keep,
    )
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(cores, own, steps),
            in_specs=[spec for _, spec in operands],
            out_specs=[wide] * (1 + keep),
            scratch_shapes=scratch,
        ),
        out_shape=[result] * (1 + keep),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_bytes,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(x) * values.size,
            bytes_accessed=(x.size + (1 + keep) * len(x) * lines * tile) * x.dtype.itemsize
            + token_tiles * values.size * values.dtype.itemsize,
            transcendentals=len(x) * lines * tile * gelu,
        ),
        interpret=interpret,
        name="block_sparse_input_gradient" if transposed else "block_sparse_matmul",
    )(*(table.reshape(-1) for table in tables), *(array for array, _ in operands))


def _kernel(
    count_ref,
    index_ref,
    position_ref,
    slot_ref,
    x_hbm,
    values_hbm,
    *refs,
    tiles,
    tokens,
    ratio,
    transposed,
    has_bias,
    gelu,
    has_residual,
    keep,
):
    refs = list(refs)
    bias_ref = refs.pop(0) if has_bias else None
    residual_ref = refs.pop(0) if has_residual else None
    y_ref = refs.pop(0)
    kept_ref = refs.pop(0) if keep else None
    x_buffers, block_buffers, sum_ref, x_arrived, blocks_arrived, *assembled = refs
    core, i, step = (pl.program_id(axis) for axis in range(3))
    own, steps = pl.num_programs(1), pl.num_programs(2)
    entries = index_ref.shape[0] // count_ref.shape[0]
    blocks = slot_ref.shape[0] // count_ref.shape[0]
    tile = sum_ref.shape[1]

    rows_of_x = functools.partial(_rows_of_x, x_hbm, x_buffers, x_arrived, tokens, tiles.tokens)
    step_number = i * steps + step

    def blocks_of(number, act):
        """`act` on the copies of the stored blocks that a step of this core needs."""
        first = lax.rem(number, steps) * tiles.lines
        buffer = lax.rem(number, 2)

        @pl.loop(0, tiles.lines)
        def _(c):
            @pl.loop(0, blocks)
            def _(p):
                slot = slot_ref[(first + c) * blocks + p]

                @pl.when(slot >= 0)
                def _():
                    act(
                        pltpu.make_async_copy(
                            values_hbm.at[slot],
                            block_buffers.at[buffer, c, p],
                            blocks_arrived.at[buffer],
                        )
                    )

    @pl.when(step_number == 0)
    def _():
        rows_of_x(core * own, 0, lambda copy: copy.start())
        blocks_of(0, lambda copy: copy.start())

    @pl.when(step == 0)
    def _():
        rows_of_x(core * own + i, lax.rem(i, 2), lambda copy: copy.wait())

        @pl.when(i + 1 < own)
        def _():
            rows_of_x(core * own + i + 1, lax.rem(i + 1, 2), lambda copy: copy.start())

    @pl.when(step_number + 1 < own * steps)
    def _():
        blocks_of(step_number + 1, lambda copy: copy.start())

    blocks_of(step_number, lambda copy: copy.wait())

    @pl.loop(0, tiles.lines)
    def _(c):
        line = step * tiles.lines + c
        weights = _Weights(
            block_buffers.at[lax.rem(step_number, 2), c],
            position_ref,
            line * entries,
            ratio,
            transposed,
            assembled[0] if assembled else None,
        )
        columns = pl.ds(pl.multiple_of(c * tile, tile), tile)

        def finish(rows, total):
            if has_bias:
                total = total + bias_ref[:, columns]
            if keep:
                kept_ref[rows, columns] = total.astype(kept_ref.dtype)
            if gelu:
                total = value_and_derivative(total)[0]
            if has_residual:
                total = total + residual_ref[rows, columns].astype(jnp.float32)
            y_ref[rows, columns] = total.astype(y_ref.dtype)

        x_ref = x_buffers.at[lax.rem(i, 2)]
        _line(x_ref, index_ref, weights, count_ref[line], entries, tiles, sum_ref, finish)


def _line(x_ref, index_ref, weights, count, entries, tiles, sum_ref, finish):
    """One tile column of the result: a dot for so many entries, summed in float32."""
    tile = sum_ref.shape[1]
    contraction = ((1,), (1 if weights.transposed else 0,))

    def dot(first, weight, rows):
        gathered = [
            x_ref[
                rows, pl.ds(pl.multiple_of(index_ref[weights.line + first + k] * tile, tile), tile)
            ]
            for k in range(tiles.entries)
        ]
        return lax.dot_general(
            jnp.concatenate(gathered, axis=1),
            weight,
            (contraction, ((), ())),
            precision=precision(weight.dtype),
            preferred_element_type=jnp.float32,
        )

    def over_rows(body):
        @pl.loop(0, tiles.tokens // tiles.rows)
        def _(r):
            body(pl.ds(pl.multiple_of(r * tiles.rows, tiles.rows), tiles.rows))

    if entries == tiles.entries:
        weight = weights.load(0, tiles.entries)
        over_rows(lambda rows: finish(rows, dot(0, weight, rows)))
        return
    sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.loop(0, pl.cdiv(count, tiles.entries))
    def _(chunk):
        first = chunk * tiles.entries
        weight = weights.load(first, tiles.entries)

        def add(rows):
            sum_ref[rows, :] += dot(first, weight, rows)

        over_rows(add)

    over_rows(lambda rows: finish(rows, sum_ref[rows, :]))


class _Weights(NamedTuple):
    """The weight tiles of one line, out of its stored blocks."""

    blocks_ref: Any
    position_ref: Any
    line: Any
    ratio: int
    transposed: bool
    assembled_ref: Any

    def load(self, first, number):
        """Tiles first to first + number along the contraction; zero where none is stored."""
        if self.ratio == 1:
            parts = [self._block(first + k, 0, 0) for k in range(number)]
        else:
            parts = self._assembled(first, number)
        return jnp.concatenate(parts, axis=1 if self.transposed else 0)

    def _block(self, entry, other, own):
        at = ((self.line + entry) * self.ratio + other) * self.ratio + own
        position = self.position_ref[at]
        return jnp.where(position >= 0, self.blocks_ref[jnp.maximum(position, 0)], 0)

    def _assembled(self, first, number):
        block = self.blocks_ref.shape[-1]
        side = [pl.ds(part * block, block) for part in range(self.ratio)]

        @pl.loop(0, number)
        def _(k):
            for other in range(self.ratio):
                for own in range(self.ratio):
                    place = (own, other) if self.transposed else (other, own)
                    part = self._block(first + k, other, own)
                    self.assembled_ref[k, side[place[0]], side[place[1]]] = part

        return [self.assembled_ref[k] for k in range(number)]


def _rows_of_x(x_hbm, buffers, arrived, tokens, tile, number, buffer, act):
    """`act` on the copy of token tile `number`; the last one may be shorter."""
    whole, rest = divmod(tokens, tile)

    def copy(rows):
        return pltpu.make_async_copy(
            x_hbm.at[pl.ds(pl.multiple_of(number * tile, tile), rows)],
            buffers.at[buffer, pl.ds(0, rows)],
            arrived.at[buffer],
        )

    if whole:

        @pl.when(number < whole)
        def _():
            act(copy(tile))

    if rest:

        @pl.when(number == whole)
        def _():
            act(copy(rest))
