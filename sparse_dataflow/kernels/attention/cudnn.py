"""Causal attention through cuDNN's flash kernels, on NVIDIA GPUs."""

import jax


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """As `api.causal_attention`; the scores are never held."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def refusal(query: jax.Array) -> str:
    """Why cuDNN does not take operands like `query`, in its own words; empty where it does."""
    operand = jax.ShapeDtypeStruct(query.shape, query.dtype)
    try:
        jax.eval_shape(causal_attention, operand, operand, operand)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).strip().rstrip(".") + "."
    return ""
