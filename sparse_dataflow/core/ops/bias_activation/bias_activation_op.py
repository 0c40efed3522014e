"""The activation of a product with a bias: one pass forward, and one backward."""

import jax

from sparse_dataflow.core.ops.activation import activation as activation_op
from sparse_dataflow.core.ops.derivatives import broadcast_like
from sparse_dataflow.core.ops.dispatch import Implementation, Op


def run_bias_activation(x: jax.Array, bias: jax.Array, activation: str) -> jax.Array:
    """Compute the op by XLA, which fuses it with what is around."""
    return activation_op(activation)(x + broadcast_like(bias, x))


OP = Op(
    __package__,
    {
        "xla": Implementation("bias_activation_op"),
        "pallas_triton": Implementation(".chips.triton.bias_activation", "gpu", partitioned=False),
    },
    fallback=("xla",),
)
"""An implementation has `run_bias_activation` and `bias_activation_refusal` of its operands."""

IMPLEMENTATIONS = tuple(OP.implementations)


def bias_activation(
    x: jax.Array, bias: jax.Array, activation: str, implementation: str | None = None
) -> jax.Array:
    """Compute activation(x + bias); differentiable in both.

    Args:
      x: float [..., features].
      bias: [features].
      activation: a name in `config.activations`.
      implementation: one of IMPLEMENTATIONS, or None to choose by platform and shapes.

    Returns:
      [..., features], in the dtype of x.

    Raises:
      UserError: a named implementation cannot run.
    """
    operands = x, bias, activation
    return OP.module(implementation, *operands).run_bias_activation(*operands)
