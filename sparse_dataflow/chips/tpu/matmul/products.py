"""y = xW and dx = dy Wᵀ on a TPU: a token tile's whole rows in VMEM, weights streamed from HBM.

Grid: (cores, token tiles, steps of result columns), columns innermost.  A token tile's rows stay in
VMEM while every result column gathers from them.  So x is read from HBM once, and each stored block
once per token tile.  Copies of the next blocks, and of the next token tile if VMEM holds two,
overlap with compute.  Pallas pipelines the results.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparse_dataflow.chips.tpu.matmul.stream import Rows, Stream, parameters, pop_if, stream_shape
from sparse_dataflow.chips.tpu.matmul.tables import TileTables
from sparse_dataflow.chips.tpu.matmul.tuning import ProductTiles
from sparse_dataflow.core.ops.activation import value_and_derivative


def line_product(
    x: jax.Array,
    values: jax.Array,
    tables: TileTables,
    tiles: ProductTiles,
    *,
    transposed: bool,
    bias: jax.Array | None = None,
    activation: str | None = None,
    with_preactivation: bool = False,
    vmem_bytes: int,
    cores: int,
) -> tuple[jax.Array, ...]:
    """Multiply x by the stored blocks of each line.

    Args:
      x: [tokens, features], both multiples of the smallest tile (`matmul.api` pads).
      values: [nnz, block, block].
      tables: tile tables by result column.
      tiles: the tile sizes.
      transposed: whether to transpose the blocks, as dx needs.
      bias: float32 [1, lines * tile], added to the product.
      activation: name of a fused one in `config.activations`, after the bias; None for none.
      with_preactivation: whether to return the activation's input too.
      vmem_bytes: VMEM limit of the kernel.
      cores: cores to spread the token tiles over.

    Returns:
      (y,) or (y, pre-activation), each [tokens, lines * tile] in x's dtype.
    """
    lines = len(tables.count)
    stream, tables = stream_shape(values, tables, tiles.stream, tiles.lines, transposed)
    tile = stream.tile
    token_tiles = pl.cdiv(len(x), tiles.tokens)
    # Cores share token tiles, and each reads all weights.  The innermost axis is the lines, so a
    # tile of x stays in VMEM while the stored blocks stream past it.
    cores = cores if token_tiles % cores == 0 else 1
    tiles_per_core = token_tiles // cores
    # (token tile, set of result columns).  The index changes in every step, so Pallas writes
    # results back while the next ones are computed.
    wide = pl.BlockSpec(
        (tiles.tokens, tiles.lines * tile),
        lambda core, i, step, *_: (core * tiles_per_core + i, step),
    )
    flat = pl.BlockSpec((1, tiles.lines * tile), lambda core, i, step, *_: (0, step))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    operands = [(x, anywhere), (values, anywhere), *([] if bias is None else [(bias, flat)])]
    result = jax.ShapeDtypeStruct((len(x), lines * tile), x.dtype)
    kernel = functools.partial(
        _kernel,
        tiles=tiles,
        shape=stream,
        has_bias=bias is not None,
        activation=activation,
        with_preactivation=with_preactivation,
    )
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(cores, tiles_per_core, stream.lines // tiles.lines),
            in_specs=[spec for _, spec in operands],
            out_specs=[wide] * (1 + with_preactivation),
            scratch_shapes=[
                pltpu.VMEM((tiles.tokens, tile), jnp.float32),
                *Rows.scratch(x, tiles.tokens, tiles.buffers),
                *stream.scratch(values.dtype),
            ],
        ),
        out_shape=[result] * (1 + with_preactivation),
        compiler_params=parameters(vmem_bytes),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(x) * values.size,
            bytes_accessed=(x.size + (1 + with_preactivation) * len(x) * lines * tile)
            * x.dtype.itemsize
            + token_tiles * values.size * values.dtype.itemsize,
            transcendentals=len(x) * lines * tile * (activation is not None),
        ),
        name="block_sparse_input_gradient" if transposed else "block_sparse_matmul",
    )(*(table.reshape(-1) for table in tables), *(array for array, _ in operands))


def _kernel(
    stored_ref,
    index_ref,
    slot_ref,
    x_hbm,
    values_hbm,
    *optional_refs,
    tiles,
    shape,
    has_bias,
    activation,
    with_preactivation,
):
    refs = list(optional_refs)
    bias_ref, y_ref = pop_if(has_bias, refs), refs.pop(0)
    preactivation_ref = pop_if(with_preactivation, refs)
    sum_ref, x_buffers, x_arrived, *stream_refs = refs
    core, i, step = (pl.program_id(axis) for axis in range(3))
    tiles_per_core = pl.num_programs(1)
    x = Rows(x_hbm, x_buffers, x_arrived)
    weights = Stream(
        shape, tiles_per_core, stored_ref, index_ref, slot_ref, values_hbm, *stream_refs
    )

    # The first axis of the grid is the cores.  None sees the buffers of another, so each starts its
    # own copies.
    @pl.when((i == 0) & (step == 0))
    def _():
        x.start(core * tiles_per_core)
        weights.start()

    @pl.when(step == 0)
    def _():
        x.wait(core * tiles_per_core, i, tiles_per_core)

    @pl.loop(0, tiles.lines)
    def _(c):
        columns = pl.ds(pl.multiple_of(c * shape.tile, shape.tile), shape.tile)

        def finish(rows, total):
            if has_bias:
                total = total + bias_ref[:, columns]
            if with_preactivation:
                preactivation_ref[rows, columns] = total.astype(preactivation_ref.dtype)
            if activation is not None:
                total = value_and_derivative(activation, total)[0]
            y_ref[rows, columns] = total.astype(y_ref.dtype)

        weights.line(i, step * tiles.lines + c, x.at(i), tiles.rows, sum_ref, finish)
