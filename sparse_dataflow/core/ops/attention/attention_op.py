"""Self-attention: its definition, and the choice of one implementation per platform."""

import importlib
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.ops import dispatch, platforms
from sparse_dataflow.core.ops.attention import dot_product
from sparse_dataflow.core.ops.attention.dot_product import Sight, Tokens
from sparse_dataflow.files.errors import UserError

if TYPE_CHECKING:
    from sparse_dataflow.core.config.attention_rules import AttentionBlocks
    from sparse_dataflow.core.layouts.layout import BlockLayout


def plain_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    window: int = 0,
    cap: float = 0.0,
    documents: jax.Array | None = None,
    bidirectional: bool = False,
    layout: "BlockLayout | None" = None,
) -> jax.Array:
    """Compute softmax(q kᵀ / sqrt(head_dim) where key <= query) v, in float32 or wider.

    Arrays are as in `attention_op.self_attention`.  Scores, and a key for each query head, are
    materialized.
    """
    wide = jnp.promote_types(query.dtype, jnp.float32)
    group = query.shape[2] // key.shape[2]
    # `repeat`, not `tile`: query head h reads key head h // group.
    key, value = (jnp.repeat(array, group, axis=2) for array in (key, value))
    scores = jnp.einsum("bthk,bshk->bhts", query, key, preferred_element_type=wide)
    seen = jnp.tri(query.shape[1], dtype=bool)
    if window:
        # tri(k=-window) has the keys that are `window` or more tokens before the query.
        seen &= ~jnp.tri(query.shape[1], k=-window, dtype=bool)
    if bidirectional:
        # A window is as long on both sides, so the transpose has the keys after each query.
        seen |= seen.T
    if layout is not None:
        # [keys, queries], like the blocks of the layout.
        square = np.ones((layout.block, layout.block), bool)
        seen &= np.kron(layout.mask, square).T[: len(seen), : len(seen)]
    if documents is not None:
        # [batch, 1, queries, keys], the same for all heads.
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores /= math.sqrt(query.shape[-1])
    if cap:
        scores = cap * jnp.tanh(scores / cap)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights, value.astype(wide)).astype(query.dtype)


IMPLEMENTATIONS = ("reference", "xla", "cudnn", "splash")


def self_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    implementation: str | None = None,
    *,
    window: int = 0,
    cap: float = 0.0,
    documents: jax.Array | None = None,
    bidirectional: bool = False,
    blocks: "AttentionBlocks | BlockLayout | None" = None,
) -> jax.Array:
    """Compute softmax(q kᵀ / sqrt(head_dim)) v with a causal mask, or none; differentiable.

    Args:
      query: float [batch, tokens, heads, head_dim].
      key: [batch, tokens, kv heads, head_dim]; query head h reads the key/value head
        h // (heads / kv heads), which no implementation but "reference" repeats in memory.
      value: like key.
      implementation: one of IMPLEMENTATIONS, or None to choose: cuDNN on a GPU, splash attention on
        a TPU, else XLA.  XLA is also the fallback; a refusal is logged once.
      window: tokens that each query sees, itself and those before it; 0 is all.  With
        `bidirectional` it sees as many after it.
      cap: the scores s become cap * tanh(s / cap) before the softmax; 0 leaves them.
      documents: int32 [batch, tokens], see `dot_product.document_numbers`: a query sees keys of its
        own document; None for one document.
      bidirectional: whether a query also sees the keys after it.
      blocks: the blocks of keys that each block of queries sees, with a causal mask and without a
        window; see `layouts.attention_blocks`. None is all.

    Returns:
      [batch, tokens, heads, head_dim] in query's dtype; the softmax runs in float32.

    Raises:
      UserError: if shapes or dtypes disagree, or a named implementation cannot run.
    """
    _check(query, key, value, window)
    layout = _layout(blocks, key, window, bidirectional)
    settings = window, cap, documents, bidirectional, layout
    # An implementation that was named must run; the fastest one may give way to XLA.
    name = implementation or _choose(query, key, *settings)
    reason = implementation and _refusal(name, query, key, *settings)
    if reason:
        raise UserError(f"Attention implementation {name!r} cannot run: {reason}")
    if name == "reference":
        return plain_attention(query, key, value, *settings)
    if name == "splash":
        return _splash().self_attention(query, key, value, *settings)
    if name == "cudnn":
        return dot_product.cudnn_attention(query, key, value, window, documents, bidirectional)
    if layout is not None:
        from sparse_dataflow.core.ops.attention.block_attention import block_attention

        return block_attention(query, key, value, layout, documents, cap)
    tokens = Tokens(jnp.arange(query.shape[1]), documents)
    sight = Sight(window, bidirectional)
    return dot_product.xla_attention(query, key, value, tokens, tokens, sight, cap)


def _layout(blocks, key, window, bidirectional):
    """Returns the layout over the keys; None for all blocks."""
    if blocks is None:
        return None
    if window or bidirectional:
        raise UserError(
            "Attention to blocks has a window or both directions; legal with blocks: window=0, "
            "bidirectional=False."
        )
    from sparse_dataflow.core.layouts.attention_blocks import attention_layout

    return attention_layout(blocks, key.shape[1])


def shard_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    order: np.ndarray,
    shard: jax.Array,
    *,
    window: int = 0,
    cap: float = 0.0,
    documents: jax.Array | None = None,
    bidirectional: bool = False,
    blocks: "AttentionBlocks | BlockLayout | None" = None,
) -> jax.Array:
    """Compute `self_attention` of the queries of one shard of a sequence to all keys.

    Runs splash attention on a TPU, else XLA.

    Args:
      query: of the shard, float [batch, tokens / shards, heads, head_dim].
      key: of all tokens, [batch, tokens, kv heads, head_dim].
      value: like key.
      order: int32 [shards, tokens / shards], positions of the queries of each shard.
      shard: int32 [], index of the shard; traced.
      window: see `self_attention`.
      cap: see `self_attention`.
      documents: of all tokens; see `self_attention`.
      bidirectional: see `self_attention`.
      blocks: see `self_attention`.

    Returns:
      Like query.
    """
    layout = _layout(blocks, key, window, bidirectional)
    # The queries of a shard lie apart, so masks need their positions.
    at = jnp.asarray(order)[shard]
    local_documents = None if documents is None else jnp.take(documents, at, axis=1)
    fastest = _fastest()
    reason = {"cudnn": "cuDNN has no queries at other positions than the keys'."}.get(fastest, "")
    if fastest == "splash":
        reason = _splash().splash_refusal(query, layout, True) or dispatch.sharding_refusal()
    name = "xla" if reason else fastest
    dispatch.log_choice("shard_attention", name, dispatch.platform(), reason)
    if name == "splash":
        both = None if documents is None else (local_documents, documents)
        operands = query, key, value, order, shard
        return _splash().shard_attention(*operands, window, cap, both, bidirectional, layout)
    keys, sight = Tokens(jnp.arange(key.shape[1]), documents), Sight(window, bidirectional, layout)
    return dot_product.xla_attention(
        query, key, value, Tokens(at, local_documents), keys, sight, cap
    )


def _check(query, key, value, window):
    alike = {(a.shape[:2], a.shape[3:], str(a.dtype)) for a in (query, key, value)}
    fits = query.ndim == 4 and key.shape == value.shape and query.shape[2] % key.shape[2] == 0
    if len(alike) > 1 or not fits:
        shapes = ", ".join(f"{a.dtype} {list(a.shape)}" for a in (query, key, value))
        raise UserError(
            "query, key and value must share one shape [batch, tokens, heads, head_dim] and one "
            "dtype, but key and value may have fewer heads, of which the query's are a multiple; "
            f"got {shapes}."
        )
    if window < 0:
        raise UserError(f"window is {window}; legal: 1 or more tokens, or 0 for all.")


def _fastest():
    """Returns the implementation of the platform that is fastest where it can run."""
    return platforms.ATTENTION.get(dispatch.platform(), "xla")


def _choose(query, key, *settings):
    fastest = _fastest()
    reason = _refusal(fastest, query, key, *settings)
    name = "xla" if reason else fastest
    dispatch.log_choice("self_attention", name, dispatch.platform(), reason)
    return name


def _refusal(name, query, key, window=0, cap=0.0, documents=None, bidirectional=False, layout=None):
    """Return why a named implementation cannot run here; empty if it can."""
    if name not in IMPLEMENTATIONS:
        return f"the name is unknown; legal: {', '.join(IMPLEMENTATIONS)}."
    needed = next((each for each, has in platforms.ATTENTION.items() if has == name), "")
    if needed and name not in ("xla", _fastest()):
        here = dispatch.platform()
        return f"it runs on {needed}, and this is {here}; legal here: reference, xla."
    if name == "cudnn" and cap:
        return "cuDNN has no soft cap of scores."
    if name == "cudnn" and layout is not None:
        return "cuDNN has no layout of blocks."
    if name == "cudnn":
        return dot_product.cudnn_refusal(query, key, window, documents, bidirectional)
    if name == "splash":
        return _splash().splash_refusal(query, layout) or dispatch.sharding_refusal()
    return ""


def _splash():
    """Import lazily: the module imports the TPU compiler."""
    return importlib.import_module("sparse_dataflow.chips.tpu.splash")
