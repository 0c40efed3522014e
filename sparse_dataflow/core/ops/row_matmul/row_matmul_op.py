"""The product with rows: stored groups of one input and 8 to 64 neighbouring outputs.

A token that is decoded alone is bound by the bytes of the weights.  A whole matrix has all rows of
16 outputs, in the order in which a CPU reads them; half of the rows, or int8 instead of bfloat16,
are half of the time.  Shapes in names: G groups of outputs, K stored rows of each, W outputs of a
row.
"""

import jax

from sparse_dataflow.core.ops.dispatch import Implementation, Op

OP = Op(
    __package__,
    {
        "xla": Implementation("row_matmul_xla"),
        "native": Implementation(".chips.cpu.row_matmul", "cpu", partitioned=False),
    },
    fallback=("xla",),
)
"""An implementation has `run_row_matmul` of the op's operands, and `row_matmul_refusal`."""

IMPLEMENTATIONS = tuple(OP.implementations)


def row_matmul(
    x: jax.Array,
    values_GxKxW: jax.Array,
    inputs_GxK: jax.Array | None = None,
    scale: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Compute `x @ kernel * scale` of a kernel with zeros outside of the stored rows.

    Args:
      x: float [tokens, in].
      values_GxKxW: float or int8; zeros where a group has fewer rows than others.
      inputs_GxK: uint16, the input of each row; None if every group has all inputs in order.
      scale: float32 [G * W], of the outputs; None for none.
      implementation: one of IMPLEMENTATIONS, or None to choose by platform.

    Returns:
      [tokens, G * W] in x's dtype; sums are float32 (float64 for float64).

    Raises:
      UserError: a named implementation cannot run.
    """
    operands = x, values_GxKxW, inputs_GxK, scale
    return OP.module(implementation, *operands).run_row_matmul(*operands)
