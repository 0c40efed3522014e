"""Attention of a CPU that computes all scores at once.

The backward pass reads the weights in the dtype of the queries; autodiff would save four arrays
like them in float32.

Shapes in names: B batch, T queries, N key/value heads, G queries of each, K head_dim.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.core.ops import derivatives, dispatch, matrix_product


def _rows(heads, key_heads):
    """[B, T, N G, K] -> [B, N, G T, K]: the rows of one product per key head."""
    batch, tokens, _, width = heads.shape
    grouped = heads.reshape(batch, tokens, key_heads, -1, width).transpose(0, 2, 3, 1, 4)
    # A copy for itself, of whole heads: with what comes after it, XLA moves number by number.
    rows = lax.optimization_barrier(grouped)
    return rows.reshape(batch, key_heads, -1, width)


def _heads(rows, like):
    """Inverts `_rows`."""
    batch, tokens, _, width = like.shape
    grouped = rows.reshape(batch, rows.shape[1], -1, tokens, width)
    return grouped.transpose(0, 3, 1, 2, 4).reshape(like.shape).astype(like.dtype)


def _forward(_, query, key, value, mask):
    count = key.shape[2]
    q, k, v = (_rows(array, count) for array in (query, key, value))
    scores = _times(q, matrix_product.transposed(k)) / math.sqrt(query.shape[-1])
    # [B, N, G T, S] -> [B, N, G, T, S], which the mask [B, 1, T, S] fits.
    by_query = scores.reshape(*scores.shape[:2], -1, *mask.shape[2:])
    by_query = jnp.where(mask[:, :, None], by_query, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(by_query, axis=-1).astype(query.dtype).reshape(scores.shape)
    return _heads(_times(weights, v), query), (q, k, v, weights)


def _backward(_, saved, dy):
    (q, k, v, weights), dy = derivatives.again(saved, dy)
    dy_rows = _rows(dy, k.shape[1])
    wide = weights.astype(derivatives.wide(dy.dtype))
    # The gradient of a softmax subtracts the mean of its output's gradient.
    dweights = _times(dy_rows, matrix_product.transposed(v))
    mean = (dweights * wide).sum(-1, keepdims=True)
    ds = (wide * (dweights - mean)).astype(dy.dtype)
    scale = 1 / math.sqrt(q.shape[-1])
    dq = _heads(scale * _times(ds, k), dy)
    like = jax.ShapeDtypeStruct((*dy.shape[:1], k.shape[2], k.shape[1], k.shape[3]), dy.dtype)
    dk = _heads(scale * _times(matrix_product.transposed(ds), q), like)
    dv = _heads(_times(matrix_product.transposed(weights), dy_rows), like)
    return dq, dk, dv, None


def _times(a, b):
    """Multiplies the matrices of the last two axes; sums and results are float32 or wider."""
    wide = derivatives.wide(a.dtype)
    return lax.dot_general(a, b, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=wide)


_attention = derivatives.differentiable(
    lambda *operands: _forward(*operands)[0], _backward, forward=_forward
)


def attention(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """Computes `dot_product.masked_attention` without a cap; takes the same arguments."""
    return _attention(None, *dispatch.equally_varying(query, key, value, mask))
