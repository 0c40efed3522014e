"""Attention to the blocks of keys of a layout through XLA: only their scores are computed.

A block of queries gathers the keys that it reads, so that its softmax is a plain one.  The backward
pass gathers them again, computes the scores from the logarithm of each softmax's sum, and adds the
gradients of keys and values where they belong.

Shapes in names: I blocks of tokens, B batch, N key/value heads, G queries of each, T queries of a
block, S keys that it reads, K head_dim.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sparse_dataflow.core.config.remat import ATTENTION_OUTPUT
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.ops.attention import dot_product
from sparse_dataflow.core.ops.attention.dot_product import (
    PADDING,
    Tokens,
    capped_scores,
    wide_product,
)


def block_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layout: BlockLayout,
    documents: jax.Array | None = None,
    cap: float = 0.0,
) -> jax.Array:
    """Compute causal `attention_op.self_attention` of a layout; differentiable.

    Every block of queries costs as much as the one that reads most blocks.

    Args:
      layout: of the blocks of the tokens, see `attention_blocks.attention_layout`.
      documents: int32 [batch, tokens]; see `attention_op.self_attention`.
    """
    batch, length, _, width = query.shape
    grouped = query.reshape(batch, length, key.shape[2], -1, width)
    arrays = [_blocks(array, layout) for array in (grouped, key, value)]
    marks = None if documents is None else _blocks(documents, layout, -1)
    result = jnp.moveaxis(_attend(layout, cap, *arrays, marks), 0, 1)
    # Without the padding of `_blocks`.
    return result.reshape(batch, -1, *query.shape[2:])[:, :length]


def _blocks(array, layout, fill=0):
    """Returns [B, tokens, ...] as [I, B, T, ...], padded to whole blocks."""
    padding = [(0, 0), (0, layout.in_features - array.shape[1]), *[(0, 0)] * (array.ndim - 2)]
    array = jnp.pad(array, padding, constant_values=fill)
    # [B, I, T, ...] -> [I, B, T, ...]: a loop goes over the first axis.
    blocks = array.reshape(len(array), layout.in_blocks, layout.block, *array.shape[2:])
    return jnp.moveaxis(blocks, 1, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(layout, cap, query, key, value, marks):
    return _forward(layout, cap, query, key, value, marks)[0]


def _read(layout, i, marks, *arrays):
    """Returns the numbers of the blocks that block i reads, which tokens it sees of them, and
    arrays of its keys [B, S, ...].

    The table has the number 0 in the place of blocks that short rows lack: their keys are padding.
    """
    tables, place = layout.tables(), np.arange(layout.block)
    read, slots = (jnp.asarray(table)[i] for table in (tables.in_index, tables.in_slot))
    at = jnp.where(slots[:, None] < 0, PADDING, read[:, None] * layout.block + place).reshape(-1)
    gathered = [_joined(array[read]) for array in arrays]
    both = (None, None) if marks is None else (marks[i], _joined(marks[read]))
    seen = dot_product.visible(Tokens(i * layout.block + place, both[0]), Tokens(at, both[1]))
    return read, seen, *gathered


def _joined(blocks):
    """[blocks, B, T, ...] -> [B, blocks * T, ...]."""
    # The keys of a row stand together, in the order of its blocks.
    return jnp.moveaxis(blocks, 0, 1).reshape(blocks.shape[1], -1, *blocks.shape[3:])


def _forward(layout, cap, query, key, value, marks):
    def attend(row):
        i, q = row
        _, seen, k, v = _read(layout, i, marks, key, value)
        s = capped_scores(q, k, seen, cap)[0]
        log_sum = jax.nn.logsumexp(s, axis=-1)
        weights = jnp.exp(s - log_sum[..., None]).astype(v.dtype)
        return wide_product("bngts,bsnk->btngk", weights, v).astype(q.dtype), log_sum

    outputs = lax.map(attend, (jnp.arange(len(query)), query))
    result, log_sums = (checkpoint_name(array, ATTENTION_OUTPUT) for array in outputs)
    return result, (query, key, value, marks, result, log_sums)


def _backward(layout, cap, residuals, gradient):
    query, key, value, marks, result, log_sums = residuals
    wide = log_sums.dtype
    means_IxBxTxNxG = (gradient.astype(wide) * result.astype(wide)).sum(-1)

    def add_row(sums, row):
        i, q, dy, log_sum, mean = row
        read, seen, k, v = _read(layout, i, marks, key, value)
        s, slope = capped_scores(q, k, seen, cap)
        weights = jnp.exp(s - log_sum[..., None])
        # dS = P (dP - mean), as in `dot_product.chunked_attention`.
        mean = jnp.moveaxis(mean, 1, -1)[..., None]
        ds = weights * (wide_product("btngk,bsnk->bngts", dy, v) - mean) * slope
        weights, ds = weights.astype(q.dtype), ds.astype(q.dtype)
        added = (
            wide_product("bngts,btngk->bsnk", ds, q),
            wide_product("bngts,btngk->bsnk", weights, dy),
        )
        # [B, blocks * T, ...] -> [blocks, B, T, ...], the inverse of `_joined`.
        rows = [jnp.moveaxis(a.reshape(len(a), len(read), -1, *a.shape[2:]), 1, 0) for a in added]
        sums = tuple(total.at[read].add(each) for total, each in zip(sums, rows))
        return sums, wide_product("bngts,bsnk->btngk", ds, k).astype(q.dtype)

    zeros = jnp.zeros(key.shape, wide), jnp.zeros(value.shape, wide)
    rows = jnp.arange(len(query)), query, gradient, log_sums, means_IxBxTxNxG
    # Rows of blocks one after the other: several of them read one block of keys.
    (dk, dv), dq = lax.scan(add_row, zeros, rows)
    return dq, dk.astype(key.dtype), dv.astype(value.dtype), None


_attend.defvjp(_forward, _backward)
