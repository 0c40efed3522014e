"""The block-sparse MLP as two products, which every platform has."""

import jax

from sparse_dataflow.core.ops.block_sparse_matmul.matmul_op import block_sparse_matmul
from sparse_dataflow.core.ops.gelu import gelu
from sparse_dataflow.core.ops.sparse_mlp.operands import Operands
from sparse_dataflow.core.ops.wide_sums import broadcast_like


def refusal(mlp: Operands) -> str:
    """Return why this cannot run the operands; empty if it can."""
    return mlp.plain_refusal()


def sparse_mlp(mlp: Operands) -> jax.Array:
    """Compute the MLP of x [..., in_features]."""
    hidden = block_sparse_matmul(mlp.x, mlp.values_in, mlp.tables_in)
    hidden += broadcast_like(mlp.bias_in, hidden)
    return block_sparse_matmul(gelu(hidden), mlp.values_out, mlp.tables_out)
