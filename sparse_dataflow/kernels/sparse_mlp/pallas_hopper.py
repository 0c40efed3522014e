"""The sparse MLP on a Hopper GPU: six block-sparse products with fused epilogues.

Forward, the first product's epilogue applies bias and GELU, and writes the hidden layer and its
pre-activation.  Backward, the epilogue of dhidden applies the GELU's derivative.  Only the
pre-activation is saved for the backward pass, which recomputes the hidden layer elementwise.
"""

import functools

import jax
import jax.numpy as jnp

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels.block_sparse_matmul import fused
from sparse_dataflow.kernels.block_sparse_matmul.hopper import api as products
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
    """Compute `api.sparse_mlp` of bfloat16 or float32 [tokens, in_features].

    Returns:
      [tokens, out_features] in x's dtype; sums, bias and activation in float32.

    Raises:
      UserError: if `refusal` gives a reason.
    """
    if reason := refusal(x, values_in, values_out, tables_in, tables_out):
        raise UserError(f"sparse_mlp on Hopper GPUs: {reason}")
    if len(x) == 0:
        return jnp.zeros((0, len(tables_out.in_index) * values_out.shape[1]), x.dtype)
    return _mlp(None, x, values_in, bias_in, values_out, tables_in, tables_out)


def refusal(
    x: jax.Array,
    values_in: jax.Array,
    values_out: jax.Array,
    tables_in: LayoutTables,
    tables_out: LayoutTables,
) -> str:
    """Return why the target GPU cannot run these operands; empty if it can."""
    return products.refusal(x, values_in, tables_in) or products.refusal(x, values_out, tables_out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(options, *operands):
    return _value(options, *operands)


@fused.batchable
def _value(options, x, values_in, bias_in, values_out, tables_in, tables_out):
    hidden = products.block_sparse_matmul(x, values_in, tables_in, bias=bias_in, activation="gelu")
    return products.block_sparse_matmul(hidden, values_out, tables_out)


def _forward(options, *operands):
    y, preactivation = _value_and_preactivation(options, *operands)
    return y, (*operands, preactivation)


@fused.batchable
def _value_and_preactivation(options, x, values_in, bias_in, values_out, tables_in, tables_out):
    hidden, preactivation = products.value_and_preactivation(x, values_in, tables_in, bias=bias_in)
    y = products.block_sparse_matmul(hidden, values_out, tables_out)
    return y, preactivation


def _backward(options, saved, dy):
    return *_gradients(options, *saved, dy), None, None


@fused.batchable
def _gradients(
    options, x, values_in, bias_in, values_out, tables_in, tables_out, preactivation, dy
):
    hidden = value_and_derivative(preactivation.astype(jnp.float32))[0].astype(dy.dtype)
    dvalues_out = products.weight_gradient(hidden, dy, tables_out, values=values_out)
    dz = products.input_gradient(dy, values_out, tables_out, preactivation=preactivation)
    dvalues_in = products.weight_gradient(x, dz, tables_in, values=values_in)
    dx = products.input_gradient(dz, values_in, tables_in)
    dbias = jnp.sum(dz, axis=0, dtype=jnp.float32).astype(bias_in.dtype)
    return dx, dvalues_in, dbias, dvalues_out


_mlp.defvjp(_forward, _backward)
