"""Causal attention of jax.nn: through XLA everywhere, and cuDNN's flash kernels on NVIDIA GPUs."""

import functools
from typing import Any

import jax


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    window: int = 0,
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
      implementation: "xla" or "cudnn".
      mask: bool, broadcastable to [batch, heads, queries, keys]; what else must hold for a query to
        see a key.
    """
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
        implementation=implementation,
    )


def cudnn_refusal(query: jax.Array, key: jax.Array, window: int = 0) -> str:
    """Return jax's message if cuDNN cannot run such operands; empty if it can."""
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (query, key, key)]
    attend = functools.partial(causal_attention, window=window, implementation="cudnn")
    try:
        jax.eval_shape(attend, *operands)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).strip().rstrip(".") + "."
    return ""
