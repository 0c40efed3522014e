"""dW at the stored blocks on a TPU, with an optional fused derivative of an activation.

Grid: (line sets, token tiles), tokens innermost.  A line set's weight tiles are summed in VMEM in
float32 over all tokens.  Each stored block is then written to its slot, which overlaps with the
products of later lines.  The gathered operand (x, or dy if it is narrower) is transposed once per
token tile and read from HBM once per line set; the other operand is read once.  With an
activation, the kernel also computes dz = dy times the derivative at the pre-activation, and
returns it as a second result, from which dx is computed.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparse_dataflow.chips.tpu.matmul.stream import dot, pop_if, wait_for
from sparse_dataflow.chips.tpu.matmul.tables import TileTables, chunked
from sparse_dataflow.chips.tpu.matmul.tuning import GradientTiles
from sparse_dataflow.core.ops.activation import value_and_derivative


def line_gradient(
    gathered: jax.Array,
    lined: jax.Array,
    tables: TileTables,
    tiles: GradientTiles,
    *,
    result: jax.ShapeDtypeStruct,
    transposed: bool,
    activation: str | None = None,
    preactivation: jax.Array | None = None,
    vmem_bytes: int,
) -> tuple[jax.Array, ...]:
    """Compute gatheredᵀ lined (its transpose with `transposed`) at stored blocks.

    Args:
      gathered: [tokens, features], the operand that a line's entries index: x, or dy with
        `transposed`.
      lined: [tokens, lines * tile]: dy, or x with `transposed`.
      tables: tile tables by tile of `lined`.
      tiles: the tile sizes.
      result: shape and dtype of dW, [nnz, block, block].
      transposed: whether the lines are the weight's rows.
      activation: name of a fused one that follows the product; None for none.
      preactivation: [tokens, lines * tile], its input.
      vmem_bytes: VMEM limit of the kernel.

    Returns:
      (dW,), or with `preactivation` (dW, dz in dy's dtype, dbias float32 [1, lines * tile]).
    """
    ratio = tables.slot.shape[2]
    block = result.shape[1]
    tile = ratio * block
    tokens = len(gathered)
    tables = chunked(tables, tiles.lines, tiles.entries)
    entries, blocks = tables.index.shape[1], tiles.entries * ratio**2
    width = tiles.lines * tile
    # Grid: (line sets, token tiles), tokens innermost, so that the sums of a line set stay in VMEM
    # over all tokens.  A line's entries may index any feature of `gathered`, so its rows are
    # whole; only the lines of the set are read of `lined`.
    wide = pl.BlockSpec((tiles.tokens, width), lambda line_set, i, *_: (i, line_set))
    gathered_spec = pl.BlockSpec((tiles.tokens, gathered.shape[1]), lambda line_set, i, *_: (i, 0))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    operands, results = [(gathered, gathered_spec), (lined, wide)], [(result, anywhere)]
    activated = preactivation is not None
    if preactivation is not None:
        operands.append((preactivation, wide))
        flat = pl.BlockSpec((1, width), lambda line_set, i, *_: (0, line_set))
        results.append((jax.ShapeDtypeStruct(lined.shape, lined.dtype), wide))
        results.append((jax.ShapeDtypeStruct((1, lined.shape[1]), jnp.float32), flat))
    scratch = [
        pltpu.VMEM((gathered.shape[1], tiles.tokens), gathered.dtype),
        pltpu.VMEM((tiles.lines, entries, tile, tile), jnp.float32),
        pltpu.VMEM((2, blocks, block, block), result.dtype),
        pltpu.SemaphoreType.DMA((2,)),
    ]
    # The last token tile may be longer than what is left.  Its rows past the end are undefined,
    # and zeros of one factor keep them out of the sums.
    if not activated and tokens % tiles.tokens:
        scratch.append(pltpu.VMEM((tiles.tokens, width), lined.dtype))
    line_sets = len(tables.count) // tiles.lines
    kernel = functools.partial(
        _kernel,
        tiles=tiles,
        tokens=tokens,
        ratio=ratio,
        transposed=transposed,
        activation=activation,
    )
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(line_sets, pl.cdiv(tokens, tiles.tokens)),
            in_specs=[spec for _, spec in operands],
            out_specs=[spec for _, spec in results],
            scratch_shapes=scratch,
        ),
        out_shape=[shape for shape, _ in results],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=vmem_bytes,
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * tokens * result.size,
            bytes_accessed=(line_sets * gathered.size + lined.size * (1 + 2 * activated))
            * gathered.dtype.itemsize
            + result.size * result.dtype.itemsize,
            transcendentals=lined.size * activated,
        ),
        name="block_sparse_weight_gradient",
    )(*(table.reshape(-1) for table in tables), *(array for array, _ in operands))


def _kernel(
    stored_ref,
    index_ref,
    slot_ref,
    gathered_ref,
    lined_ref,
    *optional_refs,
    tiles,
    tokens,
    ratio,
    transposed,
    activation,
):
    refs, activated = list(optional_refs), activation is not None
    preactivation_ref, result_hbm = pop_if(activated, refs), refs.pop(0)
    dz_ref, bias_ref = pop_if(activated, refs), pop_if(activated, refs)
    transposed_ref, sums_ref, outgoing, sent, *refs = refs
    line_set, i = pl.program_id(0), pl.program_id(1)
    last = i == pl.num_programs(1) - 1
    entries = sums_ref.shape[1]
    blocks = outgoing.shape[1]
    tile = sums_ref.shape[2]
    block = outgoing.shape[2]
    ragged = tokens % tiles.tokens

    def zero_ragged_rows(array):
        """Zero the rows past the last token, whose contents are undefined."""
        if not ragged:
            return array
        row = lax.broadcasted_iota(jnp.int32, array.shape, 0) + i * tiles.tokens
        return jnp.where(row < tokens, array, 0)

    # The matrix unit wants one factor transposed.  The gathered one is transposed once per token
    # tile, and all lines read it.
    @pl.loop(0, transposed_ref.shape[0] // tile)
    def _(tile_number):
        features = pl.ds(pl.multiple_of(tile_number * tile, tile), tile)
        transposed_ref[features, :] = zero_ragged_rows(gathered_ref[:, features]).T

    # `prepare` writes either dz or a copy with zeroed rows; else the operand is read in place.
    masked_ref = pop_if(ragged and not activated, refs)
    factor_ref = dz_ref if activated else masked_ref if ragged else lined_ref

    def prepare(columns):
        """Write the lined factor's columns, with the activation's derivative and zeroed rows."""
        if activated:
            z = preactivation_ref[:, columns].astype(jnp.float32)
            slope = value_and_derivative(activation, z)[1]
            dz = zero_ragged_rows(lined_ref[:, columns].astype(jnp.float32) * slope)
            dz_ref[:, columns] = dz.astype(dz_ref.dtype)
            bias = jnp.sum(dz, axis=0, keepdims=True)
            bias_ref[:, columns] = jnp.where(i == 0, bias, bias_ref[:, columns] + bias)
        elif ragged:
            masked_ref[:, columns] = zero_ragged_rows(lined_ref[:, columns])

    chunks = entries // tiles.entries
    total_chunks = tiles.lines * chunks

    def send(number):
        """Start the copy of each stored block of chunk `number` of the line set."""
        buffer = lax.rem(number, 2)
        first = (line_set * total_chunks + number) * blocks
        for p in range(blocks):
            # Absent blocks and padding have the slot -1, which has no place in HBM.
            slot = slot_ref[first + p]

            @pl.when(slot >= 0)
            def start(p=p, slot=slot):
                pltpu.make_async_copy(
                    outgoing.at[buffer, p], result_hbm.at[slot], sent.at[buffer]
                ).start()

    def wait(number):
        """Wait for the copies of a chunk's stored blocks."""
        buffer = lax.rem(number, 2)
        stored = stored_ref[line_set * total_chunks + number]
        wait_for(stored, outgoing.at[buffer], sent.at[buffer])

    def write_chunk(c, chunk):
        """Write the sums of a chunk of line c to their slots."""
        number = c * chunks + chunk
        buffer = lax.rem(number, 2)

        @pl.when(number >= 2)
        def _():
            wait(number - 2)

        @pl.loop(0, tiles.entries)
        def _(k):
            for gathered_block in range(ratio):
                for line_block in range(ratio):
                    p = (k * ratio + gathered_block) * ratio + line_block
                    rows = pl.ds(gathered_block * block, block)
                    columns = pl.ds(line_block * block, block)
                    total = sums_ref[c, chunk * tiles.entries + k, rows, columns]
                    # Sums have the gathered side first, stored blocks the weight's rows.
                    total = total.T if transposed else total
                    outgoing[buffer, p] = total.astype(outgoing.dtype)

        send(number)

    def columns_of(c):
        return pl.ds(pl.multiple_of(c * tile, tile), tile)

    def add_chunk(c, chunk):
        """Add the products of a chunk of line c to its sums."""
        first = chunk * tiles.entries
        entry = (line_set * tiles.lines + c) * entries + first
        gathered_tiles = [
            transposed_ref[pl.ds(pl.multiple_of(index_ref[entry + k] * tile, tile), tile)]
            for k in range(tiles.entries)
        ]
        products = dot(jnp.concatenate(gathered_tiles, axis=0), factor_ref[:, columns_of(c)])
        # [entries, tile, tile], which hold anything before the first token tile.
        sums = sums_ref.at[c, pl.ds(first, tiles.entries)]
        sums[...] = products.reshape(-1, tile, tile) + jnp.where(i == 0, 0.0, sums[...])

    # Dots of a pair of lines overlap.
    together = 2 if chunks == 1 and tiles.lines % 2 == 0 else 1

    @pl.loop(0, tiles.lines // together)
    def _(pair):
        lines = [pair * together + n for n in range(together)]
        for c in lines:
            prepare(columns_of(c))
        if chunks == 1:
            for c in lines:
                add_chunk(c, 0)
        else:

            @pl.loop(0, chunks)
            def _(chunk):
                # Chunks without stored blocks fill up a line; nothing sends their sums.
                @pl.when(stored_ref[line_set * total_chunks + lines[0] * chunks + chunk] > 0)
                def _():
                    add_chunk(lines[0], chunk)

        @pl.when(last)
        def _():
            for c in lines:

                @pl.loop(0, chunks)
                def _(chunk, c=c):
                    write_chunk(c, chunk)

    # Each chunk waited for the one two before it, so the last two are still on their way.  The next
    # line set starts with empty buffers.
    @pl.when(last)
    def _():
        for number in range(max(0, total_chunks - 2), total_chunks):
            wait(number)
