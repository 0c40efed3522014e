"""dW at the stored blocks on a TPU, and with it the derivative of the activation.

Grid: (groups of lines, token tiles), tokens innermost.  A group's weight tiles are summed in VMEM
in float32 while all tokens pass; then each stored block is written straight to its slot, or added
to what an accumulator holds there, while later lines are still multiplied.  The operand that a
line gathers from (x, or dy where it is the narrower) is kept whole for a tile of tokens,
transposed once, and read from HBM once a group; the other operand is read once.  With a GELU, dy
times its derivative at the pre-activation is made here, in the one pass that reads dy once, and
is a second result, which dx then reads instead of dy and the pre-activation.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sparse_dataflow.kernels.block_sparse_matmul import pallas_tpu_tables
from sparse_dataflow.kernels.block_sparse_matmul.pallas_tpu_stream import precision, ref_if
from sparse_dataflow.kernels.block_sparse_matmul.tuning import GradientTiles
from sparse_dataflow.kernels.gelu.api import value_and_derivative


def line_gradient(
    whole: jax.Array,
    lined: jax.Array,
    tables: pallas_tpu_tables.TileTables,
    tiles: GradientTiles,
    *,
    result: jax.ShapeDtypeStruct,
    transposed: bool,
    preactivation: jax.Array | None = None,
    accumulator: jax.Array | None = None,
    vmem_bytes: int,
    interpret=False,
) -> tuple[jax.Array, ...]:
    """Products of the columns of two operands, summed over tokens, at stored blocks.

    Args:
      whole: [tokens, features], whose tiles the entries of a line index: x, or dy with
        `transposed`.
      lined: [tokens, lines * tile]: dy, or x with `transposed`.
      tables: the lines, by tile of `lined`.
      tiles: the tile sizes.
      result: shape and dtype of dW, [nnz, block, block].
      transposed: whether the lines are the weight's rows.
      preactivation: [tokens, lines * tile] where a GELU came after the product.
      accumulator: float32 of dW's shape that dW is added to; its buffer becomes the result's.
      vmem_bytes: VMEM limit of the kernel.
      interpret: as in `pl.pallas_call`.

    Returns:
      (dW,), and with `preactivation` (dW, dy of the product in dy's dtype, dbias float32
      [1, lines * tile]).
    """
    ratio = tables.slot.shape[2]
    block = result.shape[1]
    tile = ratio * block
    tokens = len(whole)
    tables = pallas_tpu_tables.padded(tables, tiles.lines, tiles.entries)
    entries, blocks = tables.index.shape[1], tiles.entries * ratio**2
    width = tiles.lines * tile
    wide = pl.BlockSpec((tiles.tokens, width), lambda group, i, *_: (i, group))
    kept = pl.BlockSpec((tiles.tokens, whole.shape[1]), lambda group, i, *_: (i, 0))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    operands = [(whole, kept), (lined, wide), (preactivation, wide), (accumulator, anywhere)]
    operands = [(array, spec) for array, spec in operands if array is not None]
    results = [(result, anywhere)]
    activated = preactivation is not None
    if activated:
        flat = pl.BlockSpec((1, width), lambda group, i, *_: (0, group))
        results.append((jax.ShapeDtypeStruct(lined.shape, lined.dtype), wide))
        results.append((jax.ShapeDtypeStruct((1, lined.shape[1]), jnp.float32), flat))
    scratch = [
        pltpu.VMEM((whole.shape[1], tiles.tokens), whole.dtype),
        pltpu.VMEM((tiles.lines, entries, tile, tile), jnp.float32),
        pltpu.VMEM((2, blocks, block, block), result.dtype),
        pltpu.SemaphoreType.DMA((2,)),
    ]
    if not activated and tokens % tiles.tokens:
        scratch.append(pltpu.VMEM((tiles.tokens, width), lined.dtype))
    if accumulator is not None:
        scratch.append(pltpu.VMEM((2, blocks, block, block), jnp.float32))
        scratch.append(pltpu.SemaphoreType.DMA((2,)))
    groups = len(tables.count) // tiles.lines
    kernel = functools.partial(
        _kernel,
        tiles=tiles,
        tokens=tokens,
        ratio=ratio,
        transposed=transposed,
        activated=activated,
        adds=accumulator is not None,
    )
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(groups, pl.cdiv(tokens, tiles.tokens)),
            in_specs=[spec for _, spec in operands],
            out_specs=[spec for _, spec in results],
            scratch_shapes=scratch,
        ),
        out_shape=[shape for shape, _ in results],
        input_output_aliases={} if accumulator is None else {len(tables) + len(operands) - 1: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * tokens * result.size,
            bytes_accessed=(groups * whole.size + lined.size * (1 + 2 * activated))
            * whole.dtype.itemsize
            + result.size * result.dtype.itemsize,
            transcendentals=lined.size * activated,
        ),
        interpret=interpret,
        name="block_sparse_weight_gradient",
    )(*(table.reshape(-1) for table in tables), *(array for array, _ in operands))


def _kernel(
    count_ref,
    index_ref,
    slot_ref,
    whole_ref,
    lined_ref,
    *more,
    tiles,
    tokens,
    ratio,
    transposed,
    activated,
    adds,
):
    refs = list(more)
    preactivation_ref, accumulator_hbm = ref_if(activated, refs), ref_if(adds, refs)
    result_hbm = refs.pop(0)
    derived_ref, bias_ref = ref_if(activated, refs), ref_if(activated, refs)
    turned_ref, sums_ref, outgoing, sent, *refs = refs
    group, i = pl.program_id(0), pl.program_id(1)
    last = i == pl.num_programs(1) - 1
    entries = sums_ref.shape[1]
    blocks = outgoing.shape[1]
    tile = sums_ref.shape[2]
    block = outgoing.shape[2]
    ragged = tokens % tiles.tokens

    def own_rows(array):
        """Zeros where the last token tile reaches past the last token, and reads anything."""
        if not ragged:
            return array
        row = lax.broadcasted_iota(jnp.int32, array.shape, 0) + i * tiles.tokens
        return jnp.where(row < tokens, array, 0)

    @pl.loop(0, turned_ref.shape[0] // tile)
    def _(part):
        features = pl.ds(pl.multiple_of(part * tile, tile), tile)
        turned_ref[features, :] = own_rows(whole_ref[:, features]).T

    masked_ref = ref_if(ragged and not activated, refs)
    factor_ref = derived_ref if activated else masked_ref if ragged else lined_ref

    def prepare(columns):
        """The other factor's columns, with the activation's derivative and without foreign rows."""
        if activated:
            slope = value_and_derivative(preactivation_ref[:, columns].astype(jnp.float32))[1]
            derived = own_rows(lined_ref[:, columns].astype(jnp.float32) * slope)
            derived_ref[:, columns] = derived.astype(derived_ref.dtype)
            bias = jnp.sum(derived, axis=0, keepdims=True)
            bias_ref[:, columns] = jnp.where(i == 0, bias, bias_ref[:, columns] + bias)
        elif ragged:
            masked_ref[:, columns] = own_rows(lined_ref[:, columns])

    incoming, received = ref_if(adds, refs), ref_if(adds, refs)

    @pl.when(i == 0)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)

    chunks = entries // tiles.entries
    parts = tiles.lines * chunks

    def blocks_of(number, act):
        """`act(p, slot)` on each stored block p of chunk `number` of the group."""
        first = (group * parts + number) * blocks

        @pl.loop(0, blocks)
        def _(p):
            slot = slot_ref[first + p]

            @pl.when(slot >= 0)
            def _():
                act(p, slot)

    def sends(number, act):
        half = lax.rem(number, 2)
        copy = lambda p, slot: pltpu.make_async_copy(  # noqa: E731
            outgoing.at[half, p], result_hbm.at[slot], sent.at[half]
        )
        blocks_of(number, lambda p, slot: act(copy(p, slot)))

    def receives(number, act):
        half = lax.rem(number, 2)
        copy = lambda p, slot: pltpu.make_async_copy(  # noqa: E731
            accumulator_hbm.at[slot], incoming.at[half, p], received.at[half]
        )
        blocks_of(number, lambda p, slot: act(copy(p, slot)))

    start, wait = (lambda copy: copy.start()), (lambda copy: copy.wait())

    def round_off(c, chunk):
        """The sums of a chunk of line c to their slots."""
        number = c * chunks + chunk
        half = lax.rem(number, 2)

        @pl.when(number >= 2)
        def _():
            sends(number - 2, wait)

        if adds:

            @pl.when(number + 1 < parts)
            def ahead():
                receives(number + 1, start)

            receives(number, wait)

        @pl.loop(0, tiles.entries)
        def _(k):
            for other in range(ratio):
                for own in range(ratio):
                    p = (k * ratio + other) * ratio + own
                    rows, columns = pl.ds(other * block, block), pl.ds(own * block, block)
                    part = sums_ref[c, chunk * tiles.entries + k, rows, columns]
                    part = part.T if transposed else part
                    if adds:
                        part = part + incoming[half, p]
                    outgoing[half, p] = part.astype(outgoing.dtype)

        sends(number, start)

    if adds:

        @pl.when(last)
        def first_of_all():
            receives(0, start)

    @pl.loop(0, tiles.lines)
    def _(c):
        line = group * tiles.lines + c
        columns = pl.ds(pl.multiple_of(c * tile, tile), tile)
        prepare(columns)

        @pl.loop(0, pl.cdiv(count_ref[line], tiles.entries))
        def _(chunk):
            first = chunk * tiles.entries
            gathered = [
                turned_ref[
                    pl.ds(pl.multiple_of(index_ref[line * entries + first + k] * tile, tile), tile)
                ]
                for k in range(tiles.entries)
            ]
            products = jnp.dot(
                jnp.concatenate(gathered, axis=0),
                factor_ref[:, columns],
                precision=precision(factor_ref.dtype),
                preferred_element_type=jnp.float32,
            )
            sums_ref[c, pl.ds(first, tiles.entries)] += products.reshape(-1, tile, tile)

        @pl.when(last)
        def _():
            @pl.loop(0, chunks)
            def _(chunk):
                round_off(c, chunk)

    @pl.when(last)
    def _():
        for number in range(max(0, parts - 2), parts):
            sends(number, wait)
