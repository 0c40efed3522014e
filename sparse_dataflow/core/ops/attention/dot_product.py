"""Causal attention of jax.nn: through XLA everywhere, and cuDNN's flash kernels on NVIDIA GPUs.

jax.nn has no soft cap of scores, so that `masked_attention` computes it.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    window: int = 0,
    cap: float = 0.0,
    *,
    implementation: Any,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Compute `api.causal_attention`; cuDNN does not materialize the scores.

    Args:
      query: as `api.causal_attention` takes it.
      key: likewise.
      value: likewise.
      window: likewise.
      cap: likewise; cuDNN has none.
      implementation: "xla" or "cudnn".
      mask: bool, broadcastable to [batch, heads, queries, keys]; what else must hold for a query to
        see a key.
    """
    if cap:
        tokens = query.shape[1]
        seen = jnp.tri(tokens, dtype=bool)
        if window:
            seen &= ~jnp.tri(tokens, k=-window, dtype=bool)
        return masked_attention(query, key, value, seen if mask is None else seen & mask, cap)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
        implementation=implementation,
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
      cap: see `api.causal_attention`.

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


def cudnn_refusal(query: jax.Array, key: jax.Array, window: int = 0) -> str:
    """Return jax's message if cuDNN cannot run such operands; empty if it can."""
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (query, key, key)]
    attend = functools.partial(causal_attention, window=window, implementation="cudnn")
    try:
        jax.eval_shape(attend, *operands)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).strip().rstrip(".") + "."
    return ""
