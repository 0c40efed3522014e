"""The sparse MLP on a Hopper GPU: six block-sparse products with fused epilogues.

Forward, the first product's epilogue applies bias and activation, and writes the hidden layer and
its pre-activation.  Backward, the epilogue of dhidden applies the activation's derivative.  Only
the pre-activation is saved for the backward pass, which recomputes the hidden layer elementwise.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from sparse_dataflow.chips.hopper import api as products
from sparse_dataflow.core.config.remat import PROJECTION_OUTPUT
from sparse_dataflow.core.ops import derivatives
from sparse_dataflow.core.ops.activation import value_and_derivative
from sparse_dataflow.core.ops.sparse_mlp.mlp_op import Operands


def run_sparse_mlp(mlp: Operands) -> jax.Array:
    """Compute the MLP of bfloat16 or float32; sums, bias and activation in float32."""
    return _mlp(mlp.activation, *mlp[:6])


def sparse_mlp_refusal(mlp: Operands) -> str:
    """Return why the target GPU cannot run these operands; empty if it can."""
    return (
        mlp.plain_refusal()
        or products.block_sparse_matmul_refusal(mlp.x, mlp.values_in, mlp.tables_in)
        or products.block_sparse_matmul_refusal(mlp.x, mlp.values_out, mlp.tables_out)
    )


def _products(activation, x, values_in, bias_in, values_out, tables_in, tables_out):
    hidden = products.block_sparse_matmul(
        x, values_in, tables_in, bias=bias_in, activation=activation
    )
    return products.block_sparse_matmul(hidden, values_out, tables_out)


def _forward(activation, *operands):
    y, preactivation = _value_and_preactivation(activation, *operands)
    preactivation = checkpoint_name(preactivation, PROJECTION_OUTPUT)
    return y, (*operands, preactivation)


@derivatives.batchable
def _value_and_preactivation(activation, x, values_in, bias_in, values_out, tables_in, tables_out):
    hidden, preactivation = products.value_and_preactivation(
        x, values_in, tables_in, bias=bias_in, activation=activation
    )
    y = products.block_sparse_matmul(hidden, values_out, tables_out)
    return y, preactivation


def _backward(activation, saved, dy):
    return *_gradients(activation, *saved, dy), None, None


@derivatives.batchable
def _gradients(
    activation, x, values_in, bias_in, values_out, tables_in, tables_out, preactivation, dy
):
    # Again, element by element: the pre-activation alone was saved.
    hidden = value_and_derivative(activation, preactivation.astype(jnp.float32))[0]
    hidden = hidden.astype(dy.dtype)
    dvalues_out = products.weight_gradient(hidden, dy, tables_out, values=values_out)
    dz = products.input_gradient(
        dy, values_out, tables_out, activation=activation, preactivation=preactivation
    )
    dvalues_in = products.weight_gradient(x, dz, tables_in, values=values_in)
    dx = products.input_gradient(dz, values_in, tables_in)
    # A sum over all tokens, which 16 bits would lose.
    dbias = jnp.sum(dz, axis=0, dtype=jnp.float32).astype(bias_in.dtype)
    return dx, dvalues_in, dbias, dvalues_out


_mlp = derivatives.differentiable(
    derivatives.batchable(_products),
    _backward,
    forward=_forward,
    tangent=derivatives.tangent_of(_products),
)
