"""The block-sparse matmul in Pallas kernels that jax lowers to Triton: NVIDIA GPUs from Ampere on.

For layouts without equal groups, or that change, where no kernel for this very chip exists: A100,
L4, RTX, B200.  Tables are data in device memory.  A program multiplies one output block for a tile
of tokens and reads its input blocks in place, in bfloat16 with float32 sums.

Why this route, by the compiled programs of GPT-13B's projections for a described A100
(`schedule_bench --chips=a100`): XLA does not fuse a gather into a product, so `xla` copies every
input block once for each output block that reads it, and moves several times the bytes that the
product needs.  This kernel has no temporaries, and the tensor cores' mma behind asynchronous
copies.  `jax-triton` would need the `triton` package (several hundred MB), and has no interpreter
on a CPU, so no test without a GPU.  jax has deprecated its own lowering and names no date: where it
is gone, `block_sparse_matmul_refusal` says so and `xla` runs.

float32 stays with `xla`, whose products run on the tensor cores in tf32.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sparse_dataflow.chips.triton import target
from sparse_dataflow.core.layouts.layout import LayoutTables
from sparse_dataflow.core.ops import derivatives
from sparse_dataflow.core.ops.dispatch import Shaped

BLOCKS = (32, 64, 128, 256)
"""Legal block sides."""

TILE = 128
"""Most tokens, and most columns, of a program's result: 64 float32 sums a thread."""

STEP = 32
"""Length of the partial sums that are copied at once.  Four stages of two tiles then take 64 KiB of
shared memory; an L4 has 99 KiB."""


def block_sparse_matmul(x: jax.Array, values: jax.Array, tables: LayoutTables) -> jax.Array:
    """Compute `api.block_sparse_matmul` of bfloat16 operands."""
    arrays = jax.tree.map(jnp.asarray, tables._replace(groups=None))
    return _matmul(None, x, values, arrays)


def block_sparse_matmul_refusal(x: Shaped, values: Shaped, tables: LayoutTables) -> str:
    """Return why the target GPU cannot run these operands; empty if it can."""
    del tables  # Every layout is supported.
    if reason := target.gpu_refusal():
        return reason
    if values.shape[-1] not in BLOCKS:
        legal = ", ".join(map(str, BLOCKS))
        return f"block {values.shape[-1]} does not fit the tiles; legal: {legal}."
    if (x.dtype, values.dtype) != (jnp.bfloat16, jnp.bfloat16):
        return f"x is {x.dtype} and values are {values.dtype}; legal: bfloat16."
    return ""


def _value(_, x, values, tables):
    return _line_product(x, values, tables.in_index, tables.in_slot, transposed=False)


def _gradients(_, x, values, tables, dy):
    dx = _line_product(dy, values, tables.out_index, tables.out_slot, transposed=True)
    return dx, _line_gradient(x, dy, values, tables)


_matmul = derivatives.kernel_product(_value, _gradients)


def _line_product(x, values, index, slot, transposed):
    """Multiply x [tokens, features] by each line's blocks: [tokens, lines * block].

    Args:
      x: the input.
      values: [nnz, block, block].
      index: int32 [lines, fan], the block of features that a position reads.
      slot: int32 [lines, fan], its stored block; padding (-1) is at a line's end.
      transposed: whether to multiply by the transposed blocks.
    """
    (lines, fan), block, tokens = slot.shape, values.shape[-1], len(x)
    side, step, rows = min(block, TILE), min(block, STEP), _rows(tokens)
    parts, steps = block // side, block // step
    # Without padding the loop's length is a constant of the program.
    full = slot.size == len(values)
    lengths = [] if full else [jnp.sum(slot >= 0, axis=1, dtype=jnp.int32)]

    def block_sparse_product(index, slot, x, values, *rest):
        *lengths, y = rest
        line, part = _split(pl.program_id(0), parts)
        length = fan if full else lengths[0][line]

        def add(number, total):
            # The parts of a block are steps of the same loop: a whole block may be more than
            # registers hold.
            position, start = _split(number, steps)
            start *= step
            left = x[:, pl.ds(index[line, position] * block + start, step)]
            inner, outer = pl.ds(start, step), pl.ds(part * side, side)
            stored = slot[line, position]
            right = values[stored, outer, inner] if transposed else values[stored, inner, outer]
            return total + _dot(left, right, 1, 1 if transposed else 0)

        total = lax.fori_loop(0, length * steps, add, jnp.zeros((rows, side), jnp.float32))
        y[...] = total.astype(y.dtype)

    x = _padded(x, rows)
    y = _call(
        block_sparse_product,
        # Columns first: programs that run at once read the same tokens.
        grid=(lines * parts, len(x) // rows),
        in_specs=[
            *map(target.whole, (index, slot)),
            pl.BlockSpec((rows, x.shape[1]), lambda column, tile: (tile, 0)),
            *map(target.whole, (values, *lengths)),
        ],
        out_specs=pl.BlockSpec((rows, side), lambda column, tile: (tile, column)),
        out_shape=jax.ShapeDtypeStruct((len(x), lines * block), x.dtype),
        flops=2 * len(x) * values.size,
    )(index, slot, x, values, *lengths)
    return y[:tokens]


def _line_gradient(x, dy, values, tables):
    """Return xᵀ dy at the stored blocks, in the shape and dtype of values."""
    (lines, fan), block = tables.in_slot.shape, values.shape[-1]
    side, step = min(block, TILE), min(STEP, _rows(len(x)))
    parts = block // side
    # Rows of zeros add nothing to the sums.
    x, dy = _padded(x, step), _padded(dy, step)

    def block_sparse_gradient(index, slot, x, dy, dvalues):
        line, position = _split(pl.program_id(0), fan)
        row, column = (part * side for part in _split(pl.program_id(1), parts))
        stored = slot[line, position]

        # Each stored block is at one position, so all of dvalues is written, and once; padding
        # writes nothing.
        @pl.when(stored >= 0)
        def _():
            # All tokens in one program: a sum over programs would need atomic additions, whose
            # order is not fixed.
            first = index[line, position] * block + row

            def add(number, total):
                tokens = pl.ds(number * step, step)
                left = x[tokens, pl.ds(first, side)]
                right = dy[tokens, pl.ds(line * block + column, side)]
                return total + _dot(left, right, 0, 0)

            total = lax.fori_loop(0, len(x) // step, add, jnp.zeros((side, side), jnp.float32))
            dvalues[stored, pl.ds(row, side), pl.ds(column, side)] = total.astype(dvalues.dtype)

    operands = tables.in_index, tables.in_slot, x, dy
    return _call(
        block_sparse_gradient,
        # A program for each position of the table, and for each tile of its block.
        grid=(lines * fan, parts * parts),
        in_specs=[*map(target.whole, operands)],
        out_specs=target.whole(values),
        out_shape=jax.ShapeDtypeStruct(values.shape, values.dtype),
        flops=2 * len(x) * values.size,
    )(*operands)


def _split(number, size):
    """Return (number // size, number % size) of a number that is not negative."""
    # `//` and `%` would add selects for negative numbers.
    return lax.div(number, jnp.int32(size)), lax.rem(number, jnp.int32(size))


def _dot(left, right, left_axis, right_axis):
    axes = ((left_axis,), (right_axis,)), ((), ())
    return lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)


def _call(kernel, flops, **arguments):
    moved = 2 * arguments["out_shape"].size
    return pl.pallas_call(
        kernel,
        compiler_params=target.triton.CompilerParams(num_warps=8, num_stages=4),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0),
        **arguments,
    )


def _rows(tokens):
    """Return the tokens of a tile: a power of two, because Triton has no others."""
    return min(TILE, max(16, 1 << (tokens - 1).bit_length()))


def _padded(x, rows):
    return jnp.pad(x, ((0, -len(x) % rows), (0, 0)))
