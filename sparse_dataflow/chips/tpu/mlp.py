"""The sparse MLP on a TPU by index tables: two products, the first with bias and activation.

The activation is in the epilogue of the first product, and its derivative in that of the second's
backward pass.  A kernel that kept the hidden layer on chip too would compute a seventh product,
while HBM is not what the six wait for: see "Products on TPUs" in docs/evidence/performance.md.
"""

import jax

from sparse_dataflow.chips.tpu.matmul import api as products
from sparse_dataflow.chips.tpu.matmul.tuning import TuningConfig
from sparse_dataflow.core.ops.sparse_mlp.mlp_op import Operands


def run_sparse_mlp(
    mlp: Operands, *, tuning: tuple[TuningConfig, TuningConfig] | None = None
) -> jax.Array:
    """Compute the MLP of bfloat16 or float32; sums, bias and activation in float32.

    Args:
      tuning: tiles of the products of W_in and of W_out; None chooses them.
    """
    first, second = tuning or (None, None)
    hidden = products.block_sparse_matmul(
        mlp.x,
        mlp.values_in,
        mlp.tables_in,
        bias=mlp.bias_in,
        activation=mlp.activation,
        tuning=first,
    )
    return products.block_sparse_matmul(hidden, mlp.values_out, mlp.tables_out, tuning=second)


def sparse_mlp_refusal(mlp: Operands) -> str:
    """Return why the target TPU cannot run these operands; empty if it can."""
    return (
        mlp.plain_refusal()
        or products.block_sparse_matmul_refusal(mlp.x, mlp.values_in, mlp.tables_in, activated=True)
        or products.block_sparse_matmul_refusal(mlp.x, mlp.values_out, mlp.tables_out)
    )
