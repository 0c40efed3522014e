"""Attention through XLA, and through cuDNN's flash kernels on NVIDIA GPUs.

`chunked_attention` has the scores of one chunk of queries and keys at a time.  The softmax runs
online over chunks of keys (arXiv 2112.05682), and the backward pass computes the scores again from
the queries, the keys and the logarithm of each softmax's sum (arXiv 2205.14135).  Pairs of chunks
in which no query sees a key are skipped.  jax.nn has no soft cap of scores, so that
`masked_attention` computes it.

Shapes in names: B batch, T queries, S keys, N key/value heads, G queries of each, K head_dim; C
chunks of T or S.
"""

import functools
import importlib
import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sparse_dataflow.core.config.attention_settings import DENSE_TOKENS
from sparse_dataflow.core.config.remat import ATTENTION_OUTPUT
from sparse_dataflow.core.ops import dispatch, platforms

if TYPE_CHECKING:
    from sparse_dataflow.core.layouts.layout import BlockLayout

CHUNK = 512
"""Most queries, and most keys, of a chunk."""

_HIDDEN = -1e30
"""Score of a key that a query does not see; finite, because a chunk may have no other."""


class Tokens(NamedTuple):
    """What decides which of some keys a query sees.

    Attributes:
      positions: int32 [T], in the sequence.
      documents: int32 [batch, T], see `dot_product.document_numbers`; None for one document.
    """

    positions: jax.Array
    documents: jax.Array | None = None


class Sight(NamedTuple):
    """How far a query sees in its document; fields as in `attention_op.self_attention`."""

    window: int = 0
    bidirectional: bool = False
    layout: "BlockLayout | None" = None


CAUSAL, ALL = Sight(), Sight(bidirectional=True)
"""A query sees its own key and all keys before it, or all keys."""

PADDING = jnp.iinfo(jnp.int32).max
"""Position of the padding of chunks."""


def visible(queries: Tokens, keys: Tokens, sight: Sight = CAUSAL) -> jax.Array:
    """Returns whether each query sees each key: bool [batch or 1, 1, queries, keys].

    Args:
      queries: of T queries.
      keys: of S keys; both have documents, or neither.
      sight: of the queries.
    """
    # [queries, keys].  Padding keys lie after all tokens: causal queries have a negative distance.
    distance = queries.positions[:, None] - keys.positions
    if sight.bidirectional:
        # Queries that see both sides would see padding keys as well.
        distance = jnp.where(keys.positions < PADDING, jnp.abs(distance), -1)
    seen = distance >= 0
    if sight.window:
        seen &= distance < sight.window
    if sight.layout is not None:
        # Padding is in no block; an index that is too large reads the last one.
        query, key = (tokens.positions // sight.layout.block for tokens in (queries, keys))
        seen &= jnp.asarray(sight.layout.mask)[key, query[:, None]]
    if queries.documents is None or keys.documents is None:
        return seen[None, None]
    within = queries.documents[:, None, :, None] == keys.documents[:, None, None, :]
    return seen & within


def chunked_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    queries: Tokens,
    keys: Tokens,
    sight: Sight = CAUSAL,
    cap: float = 0.0,
) -> jax.Array:
    """Compute softmax(q kᵀ / sqrt(head_dim)) v over the keys that are `visible`; differentiable.

    Args:
      query: float [batch, T, heads, head_dim].
      key: [batch, S, kv heads, head_dim]; see `attention_op.self_attention`.
      value: like key.
      queries: the tokens of the queries, each of which sees a key.
      keys: those of the keys.
      sight: of the queries.
      cap: see `attention_op.self_attention`.

    Returns:
      [batch, T, heads, head_dim] in query's dtype; the softmax runs in float32 or wider.
    """
    batch, length, _, width = query.shape
    # [batch, T, kv heads, queries of each, head_dim]: keys are shared and never repeated.
    grouped = query.reshape(batch, length, key.shape[2], -1, width)
    operands = _chunks(grouped), *map(_chunks, (key, value)), _marks(queries), _marks(keys)
    result = _attend(sight, cap, *operands)
    return _joined(result, length).reshape(query.shape)


def _chunks(array, fill=0):
    """Returns [B, T, ...] as [C, B, T / C, ...], padded to whole chunks with `fill`."""
    length = array.shape[1]
    # Equal chunks, so that the padding is shorter than the number of chunks.
    count = -(-length // CHUNK)
    size = -(-length // count)
    padding = [(0, 0), (0, count * size - length), *[(0, 0)] * (array.ndim - 2)]
    array = jnp.pad(array, padding, constant_values=fill)
    return jnp.moveaxis(array.reshape(len(array), count, size, *array.shape[2:]), 1, 0)


def _marks(tokens):
    """Returns tokens in chunks; padding comes after all others, and is a document of its own."""
    positions = _chunks(tokens.positions[None], PADDING)[:, 0]
    return Tokens(positions, None if tokens.documents is None else _chunks(tokens.documents, -1))


def _joined(chunks, length):
    """Inverts `_chunks`."""
    # Without the padding of `_chunks`.
    chunks = jnp.moveaxis(chunks, 0, 1)
    return chunks.reshape(len(chunks), -1, *chunks.shape[3:])[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(sight, cap, query_CxBxTxNxGxK, key_CxBxSxNxK, value_CxBxSxNxK, queries, keys):
    operands = query_CxBxTxNxGxK, key_CxBxSxNxK, value_CxBxSxNxK, queries, keys
    return _forward(sight, cap, *operands)[0]


def _forward(sight, cap, query_CxBxTxNxGxK, key_CxBxSxNxK, value_CxBxSxNxK, queries, keys):
    wide = jnp.promote_types(query_CxBxTxNxGxK.dtype, jnp.float32)

    def attend_queries(chunk):
        q, at = chunk
        B, T, N, G, K = q.shape

        def attend_keys(carry, chunk):
            k, v, key_at = chunk
            seen = visible(at, key_at, sight)

            def add(largest, total, weighted):
                scores = capped_scores(q, k, seen, cap)[0]
                # A query that sees no key of this chunk may get weights exp(_HIDDEN - _HIDDEN) = 1.
                # With the first key that it sees, `shrink` is exp(_HIDDEN - score) = 0 and removes
                # them.  So every query must see a key; padding queries may not, and their results
                # are cut off.
                new = jnp.maximum(largest, scores.max(-1))
                shrink, weights = jnp.exp(largest - new), jnp.exp(scores - new[..., None])
                # Weights are rounded for the matrix units alone; their sum stays in float32.
                added = wide_product("bngts,bsnk->bngtk", weights.astype(v.dtype), v)
                weighted = weighted * shrink[..., None] + added
                return new, total * shrink + weights.sum(-1), weighted

            # At run time: chunks after a causal query, outside of its window or of other documents
            # cost no product.
            return lax.cond(seen.any(), add, lambda *carry: carry, *carry), None

        start = (
            jnp.full((B, N, G, T), _HIDDEN, wide),
            jnp.zeros((B, N, G, T), wide),
            jnp.zeros((B, N, G, T, K), wide),
        )
        # The carry is the largest score so far, and the sums of weights and of weighted values
        # relative to it (arXiv 1805.02867).
        chunks = key_CxBxSxNxK, value_CxBxSxNxK, keys
        (largest, total, weighted), _ = lax.scan(attend_keys, start, chunks)
        total = jnp.where(total == 0, 1, total)  # Padding may see nothing.
        # [B, N, G, T, K] -> [B, T, N, G, K].
        result = jnp.moveaxis(weighted / total[..., None], 3, 1)
        # The second is the logarithm of the softmax's denominator.  exp(score - it) is a weight, so
        # the backward pass needs no second online softmax.
        return result.astype(q.dtype), largest + jnp.log(total)

    outputs = lax.map(attend_queries, (query_CxBxTxNxGxK, queries))
    result, log_sums = (checkpoint_name(array, ATTENTION_OUTPUT) for array in outputs)
    residuals = query_CxBxTxNxGxK, key_CxBxSxNxK, value_CxBxSxNxK, queries, keys, result, log_sums
    return result, residuals


def _backward(sight, cap, residuals, gradient_CxBxTxNxGxK):
    query_CxBxTxNxGxK, key_CxBxSxNxK, value_CxBxSxNxK, queries, keys, result, log_sums = residuals
    wide = log_sums.dtype
    # The gradient of a softmax subtracts the mean of its output's gradient.
    means = (gradient_CxBxTxNxGxK.astype(wide) * result.astype(wide)).sum(-1)
    means_CxBxNxGxT = jnp.moveaxis(means, 2, -1)

    def key_gradients(dq, chunk):
        k, v, key_at = chunk

        # Queries are the inner loop: the gradients of a chunk of keys are sums over them, and dq is
        # added where it belongs.
        def add_queries(carry, chunk):
            dq, dk, dv = carry
            i, q, dy, at, log_sum, mean = chunk
            seen = visible(at, key_at, sight)

            def gradients():
                scores, slope = capped_scores(q, k, seen, cap)
                weights = jnp.exp(scores - log_sum[..., None])
                # dS = P (dP - mean) (arXiv 2205.14135), times the slope of the scale and the cap.
                ds = weights * (wide_product("btngk,bsnk->bngts", dy, v) - mean[..., None]) * slope
                weights, ds = weights.astype(q.dtype), ds.astype(q.dtype)
                return (
                    wide_product("bngts,bsnk->btngk", ds, k),
                    wide_product("bngts,btngk->bsnk", ds, q),
                    wide_product("bngts,btngk->bsnk", weights, dy),
                )

            def nothing():
                return jnp.zeros(q.shape, wide), jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)

            added, dk_added, dv_added = lax.cond(seen.any(), gradients, nothing)
            return (dq.at[i].add(added), dk + dk_added, dv + dv_added), None

        zeros = jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)
        count = jnp.arange(len(query_CxBxTxNxGxK))
        chunks = count, query_CxBxTxNxGxK, gradient_CxBxTxNxGxK, queries, log_sums, means_CxBxNxGxT
        (dq, dk, dv), _ = lax.scan(add_queries, (dq, *zeros), chunks)
        return dq, (dk.astype(k.dtype), dv.astype(v.dtype))

    # dq of all chunks is carried: each chunk of keys adds to every chunk of queries.
    start = jnp.zeros(query_CxBxTxNxGxK.shape, wide)
    dq, (dk, dv) = lax.scan(key_gradients, start, (key_CxBxSxNxK, value_CxBxSxNxK, keys))
    return dq.astype(query_CxBxTxNxGxK.dtype), dk, dv, None, None


_attend.defvjp(_forward, _backward)


def capped_scores(
    q_BxTxNxGxK: jax.Array, k_BxSxNxK: jax.Array, seen: jax.Array, cap: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the scores [B, N, G, T, S], and their slope by the product of query and key."""
    scale = 1 / math.sqrt(q_BxTxNxGxK.shape[-1])
    scores = wide_product("btngk,bsnk->bngts", q_BxTxNxGxK, k_BxSxNxK) * scale
    slope = jnp.full((), scale, scores.dtype)
    if cap:
        # d/ds of cap tanh(s / cap) is 1 - tanh^2.
        turned = jnp.tanh(scores / cap)
        scores, slope = cap * turned, scale * (1 - turned**2)
    return jnp.where(seen[:, :, None], scores, _HIDDEN), slope


def wide_product(formula: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns an einsum that is summed in float32 or wider."""
    wide = jnp.promote_types(left.dtype, jnp.float32)
    return jnp.einsum(formula, left, right, preferred_element_type=wide)


MASK_BYTES = 2**30
"""Most bytes of cuDNN's mask of documents."""


def xla_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    queries: Tokens,
    keys: Tokens,
    sight: Sight = CAUSAL,
    cap: float = 0.0,
) -> jax.Array:
    """Compute `chunked_attention`; up to DENSE_TOKENS keys, or of a symbolic number of
    `jax.export`, all scores at once."""
    if isinstance(key.shape[1], int) and key.shape[1] > DENSE_TOKENS:
        return chunked_attention(query, key, value, queries, keys, sight, cap)
    # Kernels and chunks name what their own backward passes read: a second name would keep a copy.
    mask = visible(queries, keys, sight)
    if dispatch.on(platforms.ATTENTION_SCORES) and not cap and isinstance(key.shape[1], int):
        on_cpu = importlib.import_module("sparse_dataflow.chips.cpu.attention")
        attended = on_cpu.attention(query, key, value, mask)
    else:
        attended = masked_attention(query, key, value, mask, cap)
    return checkpoint_name(attended, ATTENTION_OUTPUT)


def cudnn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    window: int = 0,
    documents: jax.Array | None = None,
    bidirectional: bool = False,
) -> jax.Array:
    """Compute `attention_op.self_attention` without the scores.

    cuDNN takes documents as a mask of each query and key, which all heads and layers share.
    """
    mask = None
    if documents is not None:
        mask = documents[:, None, :, None] == documents[:, None, None, :]
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        is_causal=not bidirectional,
        # jax does not count the query itself: a window of w tokens is w - 1 to its left.
        local_window_size=(window - 1, bidirectional * (window - 1)) if window else None,
        implementation="cudnn",
    )


def masked_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, cap: float = 0.0
) -> jax.Array:
    """Compute attention of queries to the keys that a mask says, through XLA.

    Args:
      query: float [batch, queries, heads, head_dim].
      key: [batch, keys, kv heads, head_dim].
      value: like key.
      mask: bool, broadcastable to [batch, heads, queries, keys], whether a query sees a key.
      cap: see `attention_op.self_attention`.

    Returns:
      [batch, queries, heads, head_dim] in query's dtype.
    """
    if not cap:
        # `jax.nn` wants a mask of rank 4.
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="xla")
    wide = jnp.promote_types(query.dtype, jnp.float32)
    batch, tokens, heads, width = query.shape
    # Query heads that share a key head are an axis of their own: repeated keys would be copies.
    grouped = query.reshape(batch, tokens, key.shape[2], -1, width)
    scores = jnp.einsum("btngk,bsnk->bngts", grouped, key, preferred_element_type=wide)
    scores = scores.reshape(batch, heads, tokens, -1) / math.sqrt(width)
    # Finite: of a query that sees no key, -inf would make the softmax NaN.
    scores = jnp.where(mask, cap * jnp.tanh(scores / cap), jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    weights = weights.reshape(batch, key.shape[2], -1, *scores.shape[2:])
    return jnp.einsum("bngts,bsnk->btngk", weights, value).reshape(query.shape)


def cudnn_refusal(
    query: jax.Array,
    key: jax.Array,
    window: int = 0,
    documents: jax.Array | None = None,
    bidirectional: bool = False,
) -> str:
    """Return why cuDNN cannot run such operands, in jax's words; empty if it can."""
    batch, tokens = query.shape[:2]
    size = batch * tokens**2 * query.dtype.itemsize
    if documents is not None and size > MASK_BYTES:
        return (
            f"cuDNN's mask of documents has {size / 2**30:.1f} GiB for {batch} x {tokens} tokens; "
            f"legal: {MASK_BYTES / 2**30:.0f} GiB."
        )
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (query, key)]
    marks = None if documents is None else jax.ShapeDtypeStruct(documents.shape, documents.dtype)

    def attend(query, key, documents):
        return cudnn_attention(query, key, key, window, documents, bidirectional)

    try:
        # Tracing runs the checks of jax itself; nothing is compiled.
        jax.eval_shape(attend, *operands, marks)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).strip().rstrip(".") + "."
    return ""


def document_numbers(tokens: jax.Array, eot_id: int) -> jax.Array:
    """Returns the number of each token's document in its window, int32 [batch, tokens].

    Args:
      tokens: int32 [batch, tokens], in jax or numpy, as the result is.
      eot_id: the token that ends a document, and belongs to it.
    """
    # Less itself: the token that ends a document belongs to it.
    ends = (tokens == eot_id).astype(jnp.int32)
    return ends.cumsum(axis=1, dtype=jnp.int32) - ends
