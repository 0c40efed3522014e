"""The addition to a residual stream and the norm that reads the sum.

One pass forward, and one backward, which also has the sums of the gradients of the bias and of the
norm's parameters. Nothing is saved but the residual stream.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.core.ops import derivatives
from sparse_dataflow.core.ops.derivatives import broadcast_like
from sparse_dataflow.core.ops.dispatch import Implementation, Op, equally_varying


class Norm(NamedTuple):
    """A norm over features.

    Attributes:
      centred: whether it subtracts the mean: a layernorm; else an rmsnorm.
      epsilon: added to the variance.
      groups: groups of features that the product which reads the result takes one by one; see
        `Weight.input_groups`.  A kernel writes the features of a group side by side, so that
        nothing moves them before the product.  The result has the order of x all the same.
      run: consecutive features of a group; 0 for a single group.
    """

    centred: bool
    epsilon: float
    groups: int = 1
    run: int = 0


class Operands(NamedTuple):
    """Operands of norm(x + y + bias).

    Attributes:
      x: float [..., features], the residual stream.
      y: like x, or None to add nothing.
      bias: [features], of y; None for none.
      scale: [features].
      shift: [features] of a layernorm; None for none.
    """

    x: jax.Array
    y: jax.Array | None
    bias: jax.Array | None
    scale: jax.Array
    shift: jax.Array | None


def _normalised(norm, x, scale, shift):
    wide = x.astype(derivatives.wide(x.dtype))
    if norm.centred:
        wide -= wide.mean(-1, keepdims=True)
    # Of a layernorm, `wide` is centred by now; an rmsnorm does not subtract the mean.
    variance = jnp.square(wide).mean(-1, keepdims=True)
    result = wide * lax.rsqrt(variance + norm.epsilon) * scale
    return (result if shift is None else result + shift).astype(x.dtype)


def run_residual_norm(norm: Norm, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Compute the op by XLA, from its definition."""
    x, y, bias, scale, shift = operands
    if y is not None:
        x = x + (y if bias is None else y + broadcast_like(bias, y))
    return x, _normalised(norm, x, scale, shift)


OP = Op(
    __package__,
    {
        "xla": Implementation("residual_norm_op"),
        "pallas_triton": Implementation(".chips.triton.residual_norm", "gpu", partitioned=False),
        "pallas_tpu": Implementation(".chips.tpu.residual_norm", "tpu", partitioned=False),
    },
    fallback=("xla",),
)
"""An implementation has `run_residual_norm` and `residual_norm_refusal` of (norm, operands)."""

IMPLEMENTATIONS = tuple(OP.implementations)


def fused(norm: Norm, operands: Operands) -> tuple[jax.Array, jax.Array] | None:
    """Compute `residual_norm` by a kernel; None if no kernel runs these operands here."""
    name = OP.choose(OP.platform_implementations(), norm, operands)
    # None and no result: a caller without a kernel keeps its own graph, which XLA fuses with more.
    if name in OP.fallback:
        return None
    return OP.load(name).run_residual_norm(norm, Operands(*equally_varying(*operands)))


def residual_norm(
    norm: Norm, operands: Operands, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Add to a residual stream, and normalise the sum; differentiable in all operands.

    Args:
      implementation: one of IMPLEMENTATIONS, or None to choose by platform and shapes.

    Returns:
      (x + y + bias, its norm), like x.

    Raises:
      UserError: a named implementation cannot run.
    """
    return OP.module(implementation, norm, operands).run_residual_norm(norm, operands)
