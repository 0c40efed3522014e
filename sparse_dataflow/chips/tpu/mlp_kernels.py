"""The sparse MLP's fused TPU kernels: a token tile's hidden activations stay in VMEM.

Grid: (cores, token tiles, steps of result columns), columns innermost.  Before its first result
column, a token tile's hidden activations (`mlp_in`, bias, activation) are computed into VMEM,
from which the result columns read them.  Both weights are streamed once per token tile.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparse_dataflow.chips.tpu.matmul.stream import Rows, Stream, stream_shape
from sparse_dataflow.chips.tpu.matmul.tables import TileTables
from sparse_dataflow.chips.tpu.mlp_tuning import MlpTiles
from sparse_dataflow.core.ops.activation import value_and_derivative

_STREAM_TABLES = len(TileTables._fields)


def forward(
    x: jax.Array,
    values_in: jax.Array,
    bias_in: jax.Array,
    values_out: jax.Array,
    lines_in: TileTables,
    lines_out: TileTables,
    tiles: MlpTiles,
    *,
    activation: str,
    vmem_bytes: int,
    cores: int,
) -> jax.Array:
    """Compute activation(x W_in + bias_in) W_out.

    Args:
      x: [tokens, in features], multiples of a register's rows and of the tile.
      values_in: [nnz, block, block] of W_in.
      bias_in: float32 [1, hidden], hidden a multiple of the tile.
      values_out: stored blocks of W_out.
      lines_in: W_in by hidden column.
      lines_out: W_out by result column.
      tiles: the tile sizes.
      activation: name of a fused one in `config.activations`.
      vmem_bytes: VMEM limit of the kernel.
      cores: cores to spread the token tiles over.

    Returns:
      [tokens, result columns * tile] in x's dtype.
    """
    columns = len(lines_out.count)
    first, lines_in = stream_shape(values_in, lines_in, tiles.streams[0], 1, False)
    second, lines_out = stream_shape(values_out, lines_out, tiles.streams[1], tiles.lines, False)
    tile = first.tile
    cores, tiles_per_core = _split(len(x), tiles.tokens, cores)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    # The first step of a token tile computes its whole hidden layer in VMEM.  All steps read it,
    # one set of output lines each, so it is never written to HBM.
    return pl.pallas_call(
        functools.partial(
            _forward_kernel, tiles=tiles, first=first, second=second, activation=activation
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2 * _STREAM_TABLES,
            grid=(cores, tiles_per_core, second.lines // tiles.lines),
            in_specs=[anywhere] * 3 + [pl.BlockSpec((first.lines, tile), lambda *_: (0, 0))],
            out_specs=pl.BlockSpec(
                (tiles.tokens, tiles.lines * tile),
                # (token tile, set of result columns); the tables of scalars follow the grid's
                # indices.
                lambda core, i, step, *_: (core * tiles_per_core + i, step),
            ),
            scratch_shapes=[
                pltpu.VMEM((tiles.tokens, tile), jnp.float32),
                # The hidden layer of a token tile.
                pltpu.VMEM((tiles.tokens, bias_in.shape[1]), x.dtype),
                *Rows.scratch(x, tiles.tokens, tiles.buffers),
                *first.scratch(values_in.dtype),
                *second.scratch(values_out.dtype),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((len(x), columns * tile), x.dtype),
        compiler_params=_parameters(vmem_bytes),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(x) * (values_in.size + values_out.size),
            bytes_accessed=(len(x) * (x.shape[1] + columns * tile)) * x.dtype.itemsize
            + cores * tiles_per_core * (values_in.size + values_out.size) * x.dtype.itemsize,
            transcendentals=len(x) * bias_in.shape[1],
        ),
        name="sparse_mlp",
    )(*_flat(lines_in), *_flat(lines_out), x, values_in, values_out, bias_in.reshape(-1, tile))


def _forward_kernel(*all_refs, tiles, first, second, activation):
    refs = list(all_refs)
    tables = [_pop(refs, _STREAM_TABLES) for _ in range(2)]
    x_hbm, in_hbm, out_hbm, bias_ref, y_ref, sum_ref, hidden_ref = _pop(refs, 7)
    core, i, step = (pl.program_id(axis) for axis in range(3))
    tiles_per_core = pl.num_programs(1)
    x = Rows(x_hbm, *_pop(refs, 2))
    # Both weights pass once per token tile, so their chunks are numbered over all tiles of a core.
    weights_in = _stream(first, tiles_per_core, tables[0], in_hbm, refs)
    weights_out = _stream(second, tiles_per_core, tables[1], out_hbm, refs)

    @pl.when((i == 0) & (step == 0))
    def _():
        x.start(core * tiles_per_core)
        weights_in.start()
        weights_out.start()

    @pl.when(step == 0)
    def _():
        x.wait(core * tiles_per_core, i, tiles_per_core)

        # Any result column may read any hidden feature, so the hidden layer of a token tile is
        # complete before the first of them.
        @pl.loop(0, first.lines)
        def _(line):
            columns = _columns(line, first.tile)

            def activate(rows, total):
                z = total + bias_ref[pl.ds(line, 1), :]
                hidden = value_and_derivative(activation, z)[0]
                hidden_ref[rows, columns] = hidden.astype(hidden_ref.dtype)

            weights_in.line(i, line, x.at(i), tiles.rows, sum_ref, activate)

    @pl.loop(0, tiles.lines)
    def _(c):
        def finish(rows, total):
            y_ref[rows, _columns(c, second.tile)] = total.astype(y_ref.dtype)

        weights_out.line(i, step * tiles.lines + c, hidden_ref, tiles.rows, sum_ref, finish)


def backward(
    x: jax.Array,
    dy: jax.Array,
    values_in: jax.Array,
    bias_in: jax.Array,
    values_out: jax.Array,
    lines_in: tuple[TileTables, TileTables],
    lines_out: TileTables,
    tiles: MlpTiles,
    *,
    activation: str,
    vmem_bytes: int,
    cores: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute (dx, hidden, dz, dbias), where dz is the gradient of the pre-activation.

    The hidden layer is recomputed from x.  It and dz are written once, for the two dW kernels.

    Args:
      x: as in `forward`.
      dy: [tokens, out features].
      values_in: stored blocks of W_in.
      bias_in: as in `forward`.
      values_out: stored blocks of W_out.
      lines_in: W_in by hidden column, and by input row.
      lines_out: W_out by hidden row.
      tiles: the tile sizes.
      activation: name of a fused one in `config.activations`.
      vmem_bytes: VMEM limit of the kernel.
      cores: cores to spread the token tiles over.

    Returns:
      dx [tokens, input rows * tile] and two [tokens, hidden] in x's dtype; float32 [1, hidden].
    """
    hidden_lines, input_lines = (len(lines.count) for lines in lines_in)
    # Three streams: the hidden layer again, its gradient from dy, and dx from that.
    hidden_stream, by_column = stream_shape(
        values_in, lines_in[0], tiles.streams[0], tiles.lines, False
    )
    dhidden_stream, by_hidden = stream_shape(
        values_out, lines_out, tiles.streams[1], tiles.lines, True
    )
    dx_stream, by_row = stream_shape(values_in, lines_in[1], tiles.streams[2], tiles.lines, True)
    tile, width = hidden_stream.tile, tiles.lines * hidden_stream.tile
    steps = hidden_stream.lines // tiles.lines
    cores, tiles_per_core = _split(len(x), tiles.tokens, cores)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    wide = (tiles.tokens, width)
    # The innermost grid axis first runs the hidden lines, then those of dx.  Pallas writes a block
    # back when its index changes.  So each index stays still in the half that does not write it.
    hidden = pl.BlockSpec(
        wide, lambda core, i, step, *_: (core * tiles_per_core + i, jnp.minimum(step, steps - 1))
    )
    results = pl.BlockSpec(
        wide, lambda core, i, step, *_: (core * tiles_per_core + i, jnp.maximum(step - steps, 0))
    )
    bias = pl.BlockSpec((1, width), lambda core, i, step, *_: (0, jnp.minimum(step, steps - 1)))
    dbias = pl.BlockSpec(
        (1, 1, width),
        lambda core, i, step, *_: (core * tiles_per_core + i, 0, jnp.minimum(step, steps - 1)),
    )
    hidden_shape = jax.ShapeDtypeStruct((len(x), hidden_lines * tile), x.dtype)
    stored = 2 * values_in.size + values_out.size
    dx, h, dz, dbias_tiles = pl.pallas_call(
        functools.partial(
            _backward_kernel,
            tiles=tiles,
            streams=(hidden_stream, dhidden_stream, dx_stream),
            tokens=len(x),
            activation=activation,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3 * _STREAM_TABLES,
            grid=(cores, tiles_per_core, steps + dx_stream.lines // tiles.lines),
            in_specs=[anywhere] * 4 + [bias],
            out_specs=[results, hidden, hidden, dbias],
            scratch_shapes=[
                pltpu.VMEM((tiles.tokens, tile), jnp.float32),
                pltpu.VMEM((tiles.tokens, tile), jnp.float32),
                # dz of a token tile, from which all lines of dx gather.
                pltpu.VMEM((tiles.tokens, hidden_stream.lines * tile), x.dtype),
                *Rows.scratch(x, tiles.tokens, tiles.buffers),
                *Rows.scratch(dy, tiles.tokens, tiles.buffers),
                *hidden_stream.scratch(values_in.dtype),
                *dhidden_stream.scratch(values_out.dtype),
                *dx_stream.scratch(values_in.dtype),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((len(x), input_lines * tile), x.dtype),
            hidden_shape,
            hidden_shape,
            jax.ShapeDtypeStruct((cores * tiles_per_core, 1, hidden_lines * tile), jnp.float32),
        ],
        compiler_params=_parameters(vmem_bytes),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(x) * stored,
            bytes_accessed=(
                2 * x.size + dy.size + 2 * hidden_shape.size + cores * tiles_per_core * stored
            )
            * x.dtype.itemsize,
            transcendentals=hidden_shape.size,
        ),
        name="sparse_mlp_gradient",
    )(
        *_flat(by_column),
        *_flat(by_hidden),
        *_flat(by_row),
        x,
        dy,
        values_in,
        values_out,
        bias_in,
    )
    return dx, h, dz, jnp.sum(dbias_tiles, axis=0)


def _backward_kernel(*all_refs, tiles, streams, tokens, activation):
    refs = list(all_refs)
    tables = [_pop(refs, _STREAM_TABLES) for _ in streams]
    x_hbm, dy_hbm, in_hbm, out_hbm, bias_ref = _pop(refs, 5)
    dx_ref, hidden_ref, dz_ref, dbias_ref = _pop(refs, 4)
    sum_ref, z_scratch, dz_scratch = _pop(refs, 3)
    core, i, step = (pl.program_id(axis) for axis in range(3))
    tiles_per_core = pl.num_programs(1)
    number = core * tiles_per_core + i
    x, dy = (Rows(hbm, *_pop(refs, 2)) for hbm in (x_hbm, dy_hbm))
    hidden_stream, dhidden_stream, dx_stream = (
        _stream(shape, tiles_per_core, table, hbm, refs)
        for shape, table, hbm in zip(streams, tables, (in_hbm, out_hbm, in_hbm))
    )
    tile = streams[0].tile
    steps = streams[0].lines // tiles.lines

    @pl.when((i == 0) & (step == 0))
    def _():
        for stream in (hidden_stream, dhidden_stream, dx_stream):
            stream.start()
        for operand in (x, dy):
            operand.start(number)

    @pl.when(step == 0)
    def _():
        for operand in (x, dy):
            operand.wait(core * tiles_per_core, i, tiles_per_core)

    @pl.when(step < steps)
    def _():
        @pl.loop(0, tiles.lines)
        def _(c):
            columns, line = _columns(c, tile), step * tiles.lines + c

            def preactivate(rows, total):
                z_scratch[rows, :] = total + bias_ref[:, columns]

            def derive(rows, total):
                hidden, slope = value_and_derivative(activation, z_scratch[rows, :])
                dz_rows = total * slope
                hidden_ref[rows, columns] = hidden.astype(hidden_ref.dtype)
                rounded = dz_rows.astype(dz_scratch.dtype)
                dz_ref[rows, columns] = rounded
                # A line of dx reads any hidden columns, so all of them stay in VMEM.
                dz_scratch[rows, _columns(line, tile)] = rounded
                # The last tile may reach beyond the tokens, where rows hold anything.  Results of
                # these rows are cut off, but a sum over rows would have them.
                row = lax.broadcasted_iota(jnp.int32, dz_rows.shape, 0) + rows.start
                valid = jnp.where(row + number * tiles.tokens < tokens, dz_rows, 0)
                bias = jnp.sum(valid, axis=0, keepdims=True)
                before = jnp.where(rows.start == 0, 0, dbias_ref[0, :, columns])
                dbias_ref[0, :, columns] = before + bias

            # In this order: `derive` reads what `preactivate` left of the same line.
            hidden_stream.line(i, line, x.at(i), tiles.rows, sum_ref, preactivate)
            dhidden_stream.line(i, line, dy.at(i), tiles.rows, sum_ref, derive)

    @pl.when(step >= steps)
    def _():
        @pl.loop(0, tiles.lines)
        def _(c):
            def finish(rows, total):
                dx_ref[rows, _columns(c, tile)] = total.astype(dx_ref.dtype)

            line = (step - steps) * tiles.lines + c
            dx_stream.line(i, line, dz_scratch, tiles.rows, sum_ref, finish)


def _pop(refs, number):
    """Pop the first `number` refs."""
    first = refs[:number]
    del refs[:number]
    return first


def _stream(shape, passes, tables, hbm, refs):
    count, index, slot = tables
    stream_refs = _pop(refs, 3 if shape.ratio > 1 else 2)
    return Stream(shape, passes, count, index, slot, hbm, *stream_refs)


def _columns(line, tile):
    return pl.ds(pl.multiple_of(line * tile, tile), tile)


def _split(tokens, tile, cores):
    """Return (cores used, token tiles of each core)."""
    token_tiles = pl.cdiv(tokens, tile)
    cores = cores if token_tiles % cores == 0 else 1
    return cores, token_tiles // cores


def _flat(tables):
    return [table.reshape(-1) for table in tables]


def _parameters(vmem_bytes):
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem_bytes
    )
