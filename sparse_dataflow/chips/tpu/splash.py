"""Causal attention on TPUs, through jax's splash attention kernels."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention

LANES = 128
DTYPES = ("bfloat16", "float32")
MAX_HEAD_DIM = 256
"""The widest head that compiles for every TPU from v4 to v6e; wider ones may exceed VMEM."""

TILES = (512, 256, 128)
"""Tile sizes of queries and keys, in tokens; the largest that divides the sequence is used."""


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    window: int = 0,
    cap: float = 0.0,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Compute `api.causal_attention` without the scores; tiles without a visible key are skipped.

    Args:
      query: bfloat16 or float32 [batch, tokens, heads, head_dim], see `refusal`.
      key: [batch, tokens, kv heads, head_dim].
      value: like key.
      window: see `api.causal_attention`.
      cap: see `api.causal_attention`.
      interpret: whether to interpret the kernels on a CPU.
    """
    batch, tokens, heads, width = query.shape
    # The kernel does not scale; scaling rounds unless sqrt(width) is a power of two.
    query = (query.astype(jnp.float32) / math.sqrt(width)).astype(query.dtype)
    q, k, v = (array.swapaxes(1, 2) for array in (query, key, value))
    kernel = _kernel(tokens, heads, k.shape[1], window, cap, interpret)
    if k.shape[1] == heads:
        return jax.vmap(kernel)(q, k, v).swapaxes(1, 2)
    grouped = q.reshape(batch, k.shape[1], -1, tokens, width)
    return jax.vmap(jax.vmap(kernel))(grouped, k, v).reshape(q.shape).swapaxes(1, 2)


def refusal(query: jax.Array) -> str:
    """Return why the kernels cannot run operands like `query`; empty if they can."""
    _, tokens, _, width = query.shape
    if query.dtype not in DTYPES:
        return f"the splash kernels need {' or '.join(DTYPES)}, not {query.dtype}."
    if tokens % LANES:
        return f"the splash kernels need a multiple of {LANES} tokens, not {tokens}."
    if width > MAX_HEAD_DIM:
        return f"the splash kernels need a head_dim of at most {MAX_HEAD_DIM}, not {width}."
    return ""


def _kernel(tokens, heads, kv_heads, window, cap, interpret):
    """Return the kernel of all heads, or of the query heads of one key/value head."""
    tile = next(tile for tile in TILES if tokens % tile == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": tile for name in names}
    square = (tokens, tokens)
    mask = (
        splash_attention.LocalMask(square, (window - 1, 0), 0)
        if window
        else splash_attention.CausalMask(square)
    )
    grouped = kv_heads < heads
    make = (
        splash_attention.make_splash_mqa_single_device
        if grouped
        else splash_attention.make_splash_mha_single_device
    )
    # The mask's tables must be concrete, even inside a trace.
    with jax.ensure_compile_time_eval():
        return make(
            splash_attention.MultiHeadMask([mask] * (heads // kv_heads if grouped else heads)),
            block_sizes=splash_attention.BlockSizes(**sizes),
            attn_logits_soft_cap=cap or None,
            interpret=interpret,
        )
