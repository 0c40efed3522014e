"""The block-sparse matmul through plain XLA, with runtime tables.

Gathers the input blocks of every output block and multiplies in one batched dot, a tile of tokens
at a time.  Compile time does not depend on the number of blocks, and a changed layout runs in the
same program.  Autodiff of a gather is a scatter, hence the explicit gradient.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.sparsity.layout import LayoutTables

TOKEN_TILE = 256
"""Tokens gathered at once; bounds the gathered copy to fan_in * TOKEN_TILE rows of a block."""


@jax.custom_vjp
def block_sparse_matmul(x: jax.Array, values: jax.Array, tables: LayoutTables) -> jax.Array:
    """`x @ W` for x [tokens, in_features], values [nnz, block, block]; result in x's dtype."""
    weight = _lines(values, tables.in_slot)
    weight = weight.reshape(weight.shape[0], -1, weight.shape[-1]).swapaxes(1, 2)
    return _over_tiles(lambda x: _gathered_dot(x, tables.in_index, weight), x)


def _forward(x, values, tables):
    return block_sparse_matmul(x, values, tables), (x, values, tables)


def _backward(saved, dy):
    x, values, tables = saved
    block = values.shape[-1]
    # [in_blocks, block (in), fan_out * block (out)]: contraction over the minor axis.
    weight = _lines(values, tables.out_slot).swapaxes(1, 2)
    weight = weight.reshape(*weight.shape[:2], -1)

    def tile(dy, x):
        dx = _gathered_dot(dy, tables.out_index, weight)
        x_lines = _gather(x, tables.in_index, block)
        dy_blocks = _blocks(dy, block)
        dw = lax.dot_general(
            x_lines, dy_blocks, (((1,), (1,)), ((0,), (0,))), preferred_element_type=_wide(x.dtype)
        )
        return dx, dw

    dx, dw = _over_tiles(tile, dy, x, summed=(False, True))
    dw = dw.reshape(-1, block, block)
    slots = tables.in_slot.reshape(-1)
    if len(dw) == len(values):
        dw = dw[jnp.argsort(slots)]
    else:
        dw = jnp.zeros((len(values) + 1, block, block), dw.dtype).at[slots].set(dw)[:-1]
    return dx, dw.astype(values.dtype), None


block_sparse_matmul.defvjp(_forward, _backward)


def _wide(dtype):
    return jnp.promote_types(dtype, jnp.float32)


def _lines(values, slots):
    """Values by table line, [lines, positions, block, block]; padding (slot -1) reads zeros."""
    if slots.size != len(values):
        values = jnp.concatenate([values, jnp.zeros_like(values[:1])])
    return values[slots]


def _gather(x, index, block):
    """[tokens, features] -> [lines, tokens, positions * block], the blocks that each line reads."""
    lines, positions = index.shape
    return _blocks(x, block)[index].swapaxes(1, 2).reshape(lines, len(x), positions * block)


def _blocks(x, block):
    """[tokens, features] -> [blocks, tokens, block]."""
    return x.reshape(len(x), x.shape[1] // block, block).swapaxes(0, 1)


def _gathered_dot(x, index, weight):
    """Lines' inputs times weight [lines, block, positions * block], as [tokens, lines * block]."""
    y = lax.dot_general(
        _gather(x, index, weight.shape[1]),
        weight,
        (((2,), (2,)), ((0,), (0,))),
        preferred_element_type=_wide(x.dtype),
    )
    return y.swapaxes(0, 1).reshape(len(x), len(index) * weight.shape[1]).astype(x.dtype)


def _over_tiles(function, *arrays, summed=(False,)):
    """`function` over tiles of tokens; outputs are concatenated, or summed over tiles.

    The last, shorter tile runs by itself, so any number of tokens works.
    """
    tokens = len(arrays[0])
    whole = tokens // TOKEN_TILE
    parts = []
    if whole:
        tiles = [a[: whole * TOKEN_TILE].reshape(whole, TOKEN_TILE, -1) for a in arrays]
        parts.append(_whole_tiles(function, tiles, summed))
    if tokens % TOKEN_TILE or not whole:
        parts.append(_as_tuple(function(*(a[whole * TOKEN_TILE :] for a in arrays))))
    results = [
        sum(p) if is_sum else (p[0] if len(p) == 1 else jnp.concatenate(p))
        for p, is_sum in zip(zip(*parts), summed)
    ]
    return results[0] if len(results) == 1 else tuple(results)


def _whole_tiles(function, tiles, summed):
    if tiles[0].shape[0] == 1:
        return _as_tuple(function(*(t[0] for t in tiles)))
    shapes = _as_tuple(jax.eval_shape(function, *(t[0] for t in tiles)))
    start = tuple(
        jnp.zeros(s.shape, s.dtype) if is_sum else () for s, is_sum in zip(shapes, summed)
    )

    def body(carry, tile):
        outputs = _as_tuple(function(*tile))
        carry = tuple(c + o if is_sum else () for c, o, is_sum in zip(carry, outputs, summed))
        return carry, tuple(() if is_sum else o for o, is_sum in zip(outputs, summed))

    sums, stacks = lax.scan(body, start, tuple(tiles))
    return tuple(
        total if is_sum else stack.reshape(-1, stack.shape[-1])
        for total, stack, is_sum in zip(sums, stacks, summed)
    )


def _as_tuple(value):
    return value if isinstance(value, tuple) else (value,)
