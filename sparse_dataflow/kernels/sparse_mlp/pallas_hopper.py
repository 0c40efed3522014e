"""The sparse MLP on a Hopper GPU: six block-sparse products, everything around them in epilogues.

Forward, bias and GELU end the product that makes the hidden layer, which writes its pre-activation
beside its value.  Backward, the GELU's derivative ends the product that makes the hidden layer's
gradient.  Of the hidden layer only the pre-activation outlives the forward pass; the backward pass
makes the value again from it, elementwise.
"""

import jax
import jax.numpy as jnp

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels.block_sparse_matmul import pallas_hopper as products
from sparse_dataflow.kernels.gelu.api import value_and_derivative
from sparse_dataflow.sparsity.layout import LayoutTables


def sparse_mlp(
    x: jax.Array,
    values_in: jax.Array,
    bias_in: jax.Array,
    values_out: jax.Array,
    tables_in: LayoutTables,
    tables_out: LayoutTables,
) -> jax.Array:
    """gelu(x W_in + bias_in) W_out, differentiable in its first four arguments.

    Args:
      x: bfloat16 or float32 [tokens, in_features].
      values_in: [nnz, block, block] in x's dtype.
      bias_in: [hidden_features], any float dtype.
      values_out: [nnz, block, block] in x's dtype.
      tables_in: layout of W_in, concrete or traced.
      tables_out: layout of W_out.

    Returns:
      [tokens, out_features] in x's dtype; sums, bias and activation in float32.

    Raises:
      UserError: if there is a `refusal`.
    """
    if reason := refusal(x, values_in, values_out, tables_in, tables_out):
        raise UserError(f"sparse_mlp on Hopper GPUs: {reason}")
    return _mlp(x, values_in, bias_in, values_out, tables_in, tables_out)


def refusal(
    x: jax.Array,
    values_in: jax.Array,
    values_out: jax.Array,
    tables_in: LayoutTables,
    tables_out: LayoutTables,
) -> str:
    """Why these operands cannot run on the GPU compiled for, in words; empty where they can."""
    return products.refusal(x, values_in, tables_in) or products.refusal(x, values_out, tables_out)


@jax.custom_vjp
def _mlp(x, values_in, bias_in, values_out, tables_in, tables_out):
    hidden = products.block_sparse_matmul(x, values_in, tables_in, bias=bias_in, activation="gelu")
    return products.block_sparse_matmul(hidden, values_out, tables_out)


def _forward(x, values_in, bias_in, values_out, tables_in, tables_out):
    hidden, before = products.value_and_preactivation(x, values_in, tables_in, bias=bias_in)
    y = products.block_sparse_matmul(hidden, values_out, tables_out)
    return y, (x, values_in, bias_in, values_out, tables_in, tables_out, before)


def _backward(saved, dy):
    x, values_in, bias_in, values_out, tables_in, tables_out, before = saved
    hidden = value_and_derivative(before.astype(jnp.float32))[0].astype(dy.dtype)
    dvalues_out = products.weight_gradient(hidden, dy, tables_out, values=values_out)
    dbefore = products.input_gradient(dy, values_out, tables_out, preactivation=before)
    dvalues_in = products.weight_gradient(x, dbefore, tables_in, values=values_in)
    dx = products.input_gradient(dbefore, values_in, tables_in)
    dbias = jnp.sum(dbefore, axis=0, dtype=jnp.float32).astype(bias_in.dtype)
    return dx, dvalues_in, dbias, dvalues_out, None, None


_mlp.defvjp(_forward, _backward)
