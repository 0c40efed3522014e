"""Causal attention through the splash kernels that ship with jax, on TPUs."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention

LANES = 128
DTYPES = ("bfloat16", "float32")
MAX_HEAD_DIM = 256
"""The widest that was compiled for every TPU from v4 to v6e; more may not fit into VMEM."""

TILES = (512, 256, 128)
"""Tokens of a tile of queries or keys, the largest that divides the sequence being taken."""


def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """As `api.causal_attention`; the scores are never held, tiles above the diagonal skipped.

    Args:
      query: bfloat16 or float32 [batch, tokens, heads, head_dim], see `refusal`.
      key: like query.
      value: like query.
      interpret: run the kernels' program on a CPU.
    """
    _, tokens, heads, width = query.shape
    # The kernel scales nothing; the product is rounded where a power of two is not.
    query = (query.astype(jnp.float32) / math.sqrt(width)).astype(query.dtype)
    by_head = [array.swapaxes(1, 2) for array in (query, key, value)]
    return jax.vmap(_kernel(tokens, heads, interpret))(*by_head).swapaxes(1, 2)


def refusal(query: jax.Array) -> str:
    """Why the kernels do not take operands like `query`; empty where they do."""
    _, tokens, _, width = query.shape
    if query.dtype not in DTYPES:
        return f"the splash kernels take {' or '.join(DTYPES)}, not {query.dtype}."
    if tokens % LANES:
        return f"the splash kernels take multiples of {LANES} tokens, not {tokens}."
    if width > MAX_HEAD_DIM:
        return f"the splash kernels take head sizes up to {MAX_HEAD_DIM}, not {width}."
    return ""


def _kernel(tokens, heads, interpret):
    tile = next(tile for tile in TILES if tokens % tile == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": tile for name in names}
    mask = splash_attention.CausalMask((tokens, tokens))
    # Tables of the mask must be concrete, whatever is being traced around them.
    with jax.ensure_compile_time_eval():
        return splash_attention.make_splash_mha_single_device(
            splash_attention.MultiHeadMask([mask] * heads),
            block_sizes=splash_attention.BlockSizes(**sizes),
            interpret=interpret,
        )
