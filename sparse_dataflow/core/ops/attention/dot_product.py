"""Causal attention of jax.nn: through XLA everywhere, and cuDNN's flash kernels on NVIDIA GPUs.

jax.nn has no soft cap of scores, so that `masked_attention` computes it.
"""

import math

import jax
import jax.numpy as jnp

from sparse_dataflow.core.config.attention_kinds import DENSE_TOKENS
from sparse_dataflow.core.ops.attention import chunked
from sparse_dataflow.core.ops.attention.chunked import Tokens
from sparse_dataflow.hardware.chips import GIB

MASK_BYTES = GIB
"""Most bytes of cuDNN's mask of documents."""


def xla_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    queries: Tokens,
    keys: Tokens,
    window: int = 0,
    cap: float = 0.0,
) -> jax.Array:
    """Compute `chunked.attention`; up to DENSE_TOKENS keys, all scores at once."""
    if key.shape[1] > DENSE_TOKENS:
        return chunked.attention(query, key, value, queries, keys, window, cap)
    return masked_attention(query, key, value, chunked.visible(queries, keys, window), cap)


def cudnn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    window: int = 0,
    documents: jax.Array | None = None,
) -> jax.Array:
    """Compute `attention_op.causal_attention` without the scores.

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
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
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
      cap: see `attention_op.causal_attention`.

    Returns:
      [batch, queries, heads, head_dim] in query's dtype.
    """
    if not cap:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="xla")
    wide = jnp.promote_types(query.dtype, jnp.float32)
    batch, tokens, heads, width = query.shape
    grouped = query.reshape(batch, tokens, key.shape[2], -1, width)
    scores = jnp.einsum("btngk,bsnk->bngts", grouped, key, preferred_element_type=wide)
    scores = scores.reshape(batch, heads, tokens, -1) / math.sqrt(width)
    scores = jnp.where(mask, cap * jnp.tanh(scores / cap), jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    weights = weights.reshape(batch, key.shape[2], -1, *scores.shape[2:])
    return jnp.einsum("bngts,bsnk->btngk", weights, value).reshape(query.shape)


def cudnn_refusal(
    query: jax.Array, key: jax.Array, window: int = 0, documents: jax.Array | None = None
) -> str:
    """Return why cuDNN cannot run such operands, in jax's words; empty if it can."""
    batch, tokens = query.shape[:2]
    size = batch * tokens**2 * query.dtype.itemsize
    if documents is not None and size > MASK_BYTES:
        return (
            f"cuDNN's mask of documents has {size / GIB:.1f} GiB for {batch} x {tokens} tokens; "
            f"legal: {MASK_BYTES / GIB:.0f} GiB."
        )
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (query, key)]
    marks = None if documents is None else jax.ShapeDtypeStruct(documents.shape, documents.dtype)

    def attend(query, key, documents):
        return cudnn_attention(query, key, key, window, documents)

    try:
        jax.eval_shape(attend, *operands, marks)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).strip().rstrip(".") + "."
    return ""
