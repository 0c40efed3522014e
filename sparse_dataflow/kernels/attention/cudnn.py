"""Causal attention through cuDNN's flash kernels, on NVIDIA GPUs."""

import functools

import jax


def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, window: int = 0
) -> jax.Array:
    """Compute `api.causal_attention` without materializing the scores."""
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
        implementation="cudnn",
    )


def refusal(query: jax.Array, key: jax.Array, window: int = 0) -> str:
    """Return jax's message if cuDNN cannot run such operands; empty if it can."""
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (query, key, key)]
    try:
        jax.eval_shape(functools.partial(causal_attention, window=window), *operands)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).strip().rstrip(".") + "."
    return ""
