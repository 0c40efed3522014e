"""Attention of new tokens to the keys and values before them, which are cached.

A token that is decoded is bound by the bytes of the cache.  Shapes in names: B batch, T new tokens,
H heads, N key/value heads, S places of the cache, K head_dim.
"""

from typing import TYPE_CHECKING

import jax

from sparse_dataflow.core.ops.dispatch import Implementation, Op

if TYPE_CHECKING:
    from sparse_dataflow.core.config.attention_rules import AttentionBlocks
    from sparse_dataflow.core.layouts.layout import BlockLayout

OP = Op(
    __package__,
    {
        "xla": Implementation("cached_attention_xla"),
        "native": Implementation(".chips.cpu.cached_attention", "cpu", partitioned=False),
    },
    fallback=("xla",),
)
"""An implementation has `run_cached_attention` of the op's operands, and
`cached_attention_refusal`."""

IMPLEMENTATIONS = tuple(OP.implementations)


def cached_attention(
    q_BxTxHxK: jax.Array,
    k_BxTxNxK: jax.Array,
    v_BxTxNxK: jax.Array,
    keys_BxNxSxK: jax.Array,
    values_BxNxSxK: jax.Array,
    positions_BxT: jax.Array,
    window: int = 0,
    cap: float = 0.0,
    has_room: bool = False,
    implementation: str | None = None,
    blocks: "AttentionBlocks | BlockLayout | None" = None,
    tokens: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Writes keys and values of new tokens to a cache, and computes their attention to it.

    Args:
      positions_BxT: int32, the place of each new token, which sees itself and the places before.
        A token without a place, at S or later, is not written and sees the cache.
      window: see `attention_op.self_attention`.
      cap: see `attention_op.self_attention`.
      has_room: whether all tokens have a place: fewer kernels.
      implementation: one of IMPLEMENTATIONS, or None to choose by platform.
      blocks: see `attention_op.self_attention`.
      tokens: most of a row; 0 is S.  With more, the cache has the places of `slot_contents` alone,
        and T is 1.

    Returns:
      ([B, T, H, K] in q's dtype, the new keys, the new values); the softmax runs in float32.

    Raises:
      UserError: a named implementation cannot run.
    """
    operands = (q_BxTxHxK, k_BxTxNxK, v_BxTxNxK, keys_BxNxSxK, values_BxNxSxK, positions_BxT)
    layout = None
    if blocks is not None:
        from sparse_dataflow.core.layouts.attention_blocks import attention_layout

        layout = attention_layout(blocks, tokens or keys_BxNxSxK.shape[2])
    limits = window, cap, has_room, layout
    return OP.module(implementation, *operands, *limits).run_cached_attention(*operands, *limits)
