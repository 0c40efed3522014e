"""The block-sparse matmul through plain XLA, with runtime tables.

Gathers the input blocks of every output block and multiplies in one batched dot, a tile of tokens
at a time.  Compile time does not depend on the number of blocks, and a changed layout runs in the
same program.  Autodiff of a gather is a scatter, hence the explicit gradient.  Few rows of x take a
form of their own (`xla_few_rows`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.kernels.block_sparse_matmul import xla_few_rows
from sparse_dataflow.kernels.block_sparse_matmul.tuning_xla import TuningConfig, default_tuning
from sparse_dataflow.sparsity.layout import LayoutTables


def block_sparse_matmul(
    x: jax.Array, values: jax.Array, tables: LayoutTables, *, tuning: TuningConfig | None = None
) -> jax.Array:
    """`x @ W` for x [tokens, in_features], values [nnz, block, block]; result in x's dtype.

    Tables are arrays; tile sizes are `default_tuning`'s where none are given.
    """
    return _matmul(tuning or default_tuning(x, values, tables), x, values, tables)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(tuning, x, values, tables):
    if len(x) <= xla_few_rows.FEW_ROWS:
        return xla_few_rows.product(x, values, tables)
    weight = _lines(values, tables.in_slot)
    weight = weight.reshape(len(weight), -1, weight.shape[-1])
    return _product(x, tables.in_index, weight, tuning.forward.tokens)


def _forward(tuning, x, values, tables):
    return _matmul(tuning, x, values, tables), (x, values, tables)


def _backward(tuning, saved, dy):
    x, values, tables = saved
    block = values.shape[-1]
    weight = _lines(values, tables.out_slot).swapaxes(2, 3)
    weight = weight.reshape(len(weight), -1, block)
    dx = _product(dy, tables.out_index, weight, tuning.input_gradient.tokens)

    def tile(dy, x):
        # A left side that contracts over its major axis is slow on a CPU: dy is transposed.
        dy_blocks = _blocks(dy, block).transpose(1, 2, 0)
        return _wide_dot(dy_blocks, _gather(x, tables.in_index, block), (2, 0), (0, 1))

    dw = _over_tiles(tile, tuning.weight_gradient.tokens, dy, x, summed=True)
    # [out_blocks, block (out), fan_in * block (in)], turned and brought into the order of values.
    dw = dw.reshape(len(dw), block, -1, block).transpose(0, 2, 3, 1).reshape(-1, block, block)
    slots = tables.in_slot.reshape(-1)
    if len(dw) == len(values):
        dw = dw[jnp.argsort(slots)]
    else:
        dw = jnp.zeros((len(values) + 1, block, block), dw.dtype).at[slots].set(dw)[:-1]
    return dx, dw.astype(values.dtype), None


_matmul.defvjp(_forward, _backward)


def _lines(values, slots):
    """Values by table line, [lines, positions, block, block]; padding (slot -1) reads zeros."""
    if slots.size != len(values):
        values = jnp.concatenate([values, jnp.zeros_like(values[:1])])
    return values[slots]


def _product(x, index, weight, tile_tokens):
    """Lines' inputs times weight [lines, positions * block, block], as [tokens, lines * block]."""
    block = weight.shape[-1]

    def tile(x):
        y = _wide_dot(_gather(x, index, block), weight, (2, 1), (1, 0))
        return y.astype(x.dtype).swapaxes(0, 1).reshape(len(x), len(weight) * block)

    return _over_tiles(tile, tile_tokens, x)


def _blocks(x, block):
    """[tokens, features] -> [tokens, blocks, block]."""
    return x.reshape(len(x), x.shape[1] // block, block)


def _gather(x, index, block):
    """[tokens, features] -> [tokens, lines, positions * block], the blocks that each line reads."""
    lines, positions = index.shape
    gathered = _blocks(x, block)[:, index.reshape(-1)]
    return gathered.reshape(len(x), lines, positions * block)


def _wide_dot(a, b, a_axes, b_axes):
    """Contracts the first axis named for each side, with the second as batch axis."""
    (a_sum, a_batch), (b_sum, b_batch) = a_axes, b_axes
    return lax.dot_general(
        a,
        b,
        (((a_sum,), (b_sum,)), ((a_batch,), (b_batch,))),
        preferred_element_type=jnp.promote_types(a.dtype, jnp.float32),
    )


def _over_tiles(function, tile, *arrays, summed=False):
    """`function` over tiles of tokens; results are concatenated, or summed over tiles.

    The last, shorter tile runs by itself, so any number of tokens works.
    """
    tokens = len(arrays[0])
    whole = tokens // tile
    parts = []
    if whole > 1:
        tiles = [a[: whole * tile].reshape(whole, tile, -1) for a in arrays]
        parts.append(_whole_tiles(function, tiles, summed))
    elif whole:
        parts.append(function(*(a[:tile] for a in arrays)))
    if tokens % tile or not whole:
        parts.append(function(*(a[whole * tile :] for a in arrays)))
    if summed:
        return sum(parts)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _whole_tiles(function, tiles, summed):
    if not summed:
        stack = lax.map(lambda tile: function(*tile), tuple(tiles))
        return stack.reshape(-1, stack.shape[-1])
    shape = jax.eval_shape(function, *(t[0] for t in tiles))

    def body(total, tile):
        return total + function(*tile), None

    return lax.scan(body, jnp.zeros(shape.shape, shape.dtype), tuple(tiles))[0]
