"""The block-sparse matmul in plain XLA, with runtime tables.

One batched dot multiplies the gathered input blocks of every output block, a token tile at a time.
Compile time does not depend on the number of blocks, and changing the layout does not recompile.
The gradient is explicit, because autodiff of a gather is a scatter.  Few rows of x use
`xla_few_rows`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.core.layouts.layout import LayoutTables
from sparse_dataflow.core.ops import derivatives, dispatch, platforms
from sparse_dataflow.core.ops.block_sparse_matmul import xla_few_rows
from sparse_dataflow.core.ops.block_sparse_matmul.xla_tuning import TuningConfig, default_tuning


def block_sparse_matmul(
    x: jax.Array, values: jax.Array, tables: LayoutTables, *, tuning: TuningConfig | None = None
) -> jax.Array:
    """Compute `x @ W` for x [tokens, in_features], values [nnz, block, block], in x's dtype.

    Tables must be jax arrays. Tile sizes default to `default_tuning`.
    """
    if tuning is None and isinstance(x.shape[0], int):
        tuning = default_tuning(x, values, tables)
    return _matmul(tuning, x, values, tables)


def _value(tuning, x, values, tables):
    if dispatch.at_most(x.shape[0], xla_few_rows.FEW_ROWS):
        return xla_few_rows.product(x, values, tables)
    weight = _values_by_line(values, tables.in_slot)
    # [out_blocks, fan_in * block, block]: the stored blocks of an output block below one another.
    weight = weight.reshape(len(weight), -1, weight.shape[-1])
    stored = _stored(values, tables.in_slot)
    return _product(x, tables.in_index, stored, weight, tuning and tuning.forward)


def _backward(tuning, saved, dy):
    x, values, tables = saved
    block = values.shape[-1]
    # dx = dy W^T: the lines are input blocks, and each stored block is transposed.
    weight = _values_by_line(values, tables.out_slot).swapaxes(2, 3)
    weight = weight.reshape(len(weight), -1, block)
    stored = _stored(values, tables.out_slot)
    dx = _product(dy, tables.out_index, stored, weight, tuning and tuning.input_gradient)

    def tile(dy, x):
        # Transpose dy: contracting a left side's major axis is slow on a CPU.
        dy_blocks = _wide_on_cpu(_blocks(dy, block)).transpose(1, 2, 0)
        x_blocks = _wide_on_cpu(_gather(x, tables.in_index, block))
        # [out_blocks, block, tokens] times [tokens, out_blocks, fan_in * block], batched by output
        # block.
        return _batched_dot(dy_blocks, x_blocks, (2, 0), (0, 1))

    dw = _over_tiles(tile, tuning and tuning.weight_gradient, dy, x, summed=True)
    # From [out_blocks, block (out), fan_in * block (in)] to the order of values.
    dw = dw.reshape(len(dw), block, -1, block).transpose(0, 2, 3, 1).reshape(-1, block, block)
    slots = tables.in_slot.reshape(-1)
    if len(dw) == len(values):
        # Without padding `slots` is a permutation, and its inverse makes this a gather, not a
        # scatter.
        dw = dw[jnp.argsort(slots)]
    else:
        # All padding has slot -1 and writes to the extra last block, which is dropped.
        dw = jnp.zeros((len(values) + 1, block, block), dw.dtype).at[slots].set(dw)[:-1]
    return dx, dw.astype(values.dtype), None


_matmul = derivatives.bilinear(_value, _backward)


def _values_by_line(values, slots):
    """Gather values by table line: [lines, positions, block, block]; slot -1 reads zeros."""
    # Slot -1 is the last block in Python's counting: the appended zeros.
    if slots.size != len(values):
        values = jnp.concatenate([values, jnp.zeros_like(values[:1])])
    return values[slots]


def _stored(values, slots):
    """Returns which positions of a table are stored, bool [lines, positions]; None for all."""
    return None if slots.size == len(values) else slots >= 0


def _product(x, index, stored, weight, tiles):
    """Multiply gathered x by weight [lines, positions * block, block]: [tokens, lines * block]."""
    block = weight.shape[-1]

    def tile(x):
        y = _batched_dot(_gather(x, index, block, stored), weight, (2, 1), (1, 0))
        # A batched dot has its batch axis first: [lines, tokens, block] -> [tokens, lines, block].
        return y.astype(x.dtype).swapaxes(0, 1).reshape(x.shape[0], len(weight) * block)

    return _over_tiles(tile, tiles, x)


def _blocks(x, block):
    """[tokens, features] -> [tokens, blocks, block]."""
    return x.reshape(x.shape[0], x.shape[1] // block, block)


def _gather(x, index, block, stored=None):
    """Gather each line's input blocks: [tokens, features] -> [tokens, lines, positions * block].

    Positions that are not stored read zeros: their weight is zero, but x may be infinite.
    """
    lines, positions = index.shape
    gathered = _blocks(x, block)[:, index.reshape(-1)]
    if stored is not None:
        gathered = jnp.where(stored.reshape(-1, 1), gathered, 0)
    return gathered.reshape(x.shape[0], lines, positions * block)


def _batched_dot(a, b, a_axes, b_axes):
    """Batched dot in float32 or wider; each side's axes are (contracted, batch)."""
    (a_sum, a_batch), (b_sum, b_batch) = a_axes, b_axes
    return lax.dot_general(
        a,
        b,
        (((a_sum,), (b_sum,)), ((a_batch,), (b_batch,))),
        preferred_element_type=jnp.promote_types(a.dtype, jnp.float32),
    )


def _wide_on_cpu(x):
    """Returns float32 of a 16-bit x on a CPU, whose compiler has no such transposed product."""
    slow = dispatch.on(platforms.SLOW_TRANSPOSED)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if slow else x


def _over_tiles(function, tiles, *arrays, summed=False):
    """Map `function` over token tiles; concatenate the results, or sum them.

    A shorter last tile runs separately, so any number of tokens works.  A symbolic number is one
    tile.
    """
    tokens = arrays[0].shape[0]
    if tiles is None:  # Tokens are a symbolic dimension of `jax.export`.
        return function(*arrays)
    tile = tiles.tokens
    # A single whole tile needs no loop.
    whole = tokens // tile
    results = []
    if whole > 1:
        tiles = [a[: whole * tile].reshape(whole, tile, -1) for a in arrays]
        results.append(_whole_tiles(function, tiles, summed))
    elif whole:
        results.append(function(*(a[:tile] for a in arrays)))
    if tokens % tile or not whole:
        results.append(function(*(a[whole * tile :] for a in arrays)))
    if summed:
        return sum(results)
    return results[0] if len(results) == 1 else jnp.concatenate(results)


def _whole_tiles(function, tiles, summed):
    if not summed:
        stack = lax.map(lambda tile: function(*tile), tuple(tiles))
        return stack.reshape(-1, stack.shape[-1])
    shape = jax.eval_shape(function, *(t[0] for t in tiles))

    # Sums over tokens are carried, so that one result exists and not one for each tile.
    def body(total, tile):
        return total + function(*tile), None

    return lax.scan(body, jnp.zeros(shape.shape, shape.dtype), tuple(tiles))[0]
