"""Causal attention through cuDNN's flash kernels, on NVIDIA GPUs."""

import jax


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Compute `api.causal_attention` without materializing the scores."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def refusal(query: jax.Array) -> str:
    """Return jax's message if cuDNN cannot run operands like `query`; empty if it can."""
    operand = jax.ShapeDtypeStruct(query.shape, query.dtype)
    try:
        jax.eval_shape(causal_attention, operand, operand, operand)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).strip().rstrip(".") + "."
    return ""
