"""What pairs of kernels for `residual_norm` share: operands, and derivatives."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sparse_dataflow.core.ops import derivatives
from sparse_dataflow.core.ops.residual_norm.residual_norm_op import Operands, run_residual_norm


def stream_refusal(x: jax.Array) -> str:
    """Return why no such kernel can run the residual stream x; empty if one may."""
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"x is {x.dtype}; legal: bfloat16, float32."
    if not all(isinstance(size, int) for size in x.shape) or not x.size:
        return "x has a symbolic dimension, or no elements."
    return ""


def differentiable(
    kernel: Callable, gradients: Callable, order: Callable[[jax.Array], jax.Array] = lambda y: y
) -> Callable:
    """Returns ((norm, alone), (x, y), (bias, scale, shift)) -> (residual, normed).

    Nothing is added where `alone`; then y is None. Arrays have rows first, then the axes of a
    row.

    Args:
      kernel: (norm, x, *arrays, names=names of the arrays) -> [residual,] normed.
      gradients: (norm, residual, scale, dresidual, dnormed, sums=names of parameters) -> dx, and
        for each parameter float32 [parts, axes of a row] sums over rows.
      order: moves the axes of a row to those of the kernel's normed.
    """

    def value(options, arrays, parameters):
        norm, alone = options
        (x, *added), (bias, scale, shift) = arrays, parameters
        named = {"y": None, "bias": None} if alone else {"y": added[0], "bias": bias}
        named |= {"scale": scale, "shift": shift}
        named = {name: array for name, array in named.items() if array is not None}
        outputs = kernel(norm, x, *named.values(), names=tuple(named))
        return (x, *outputs) if alone else tuple(outputs)

    def forward(options, arrays, parameters):
        outputs = value(options, arrays, parameters)
        return outputs, (outputs[0], parameters)

    def backward(options, saved, cotangents):
        norm, alone = options
        residual, (bias, scale, shift) = saved
        names = {"bias": bias, "scale": scale, "shift": shift}
        sums = tuple(name for name, array in names.items() if array is not None)
        dx, *totals = gradients(norm, residual, scale, *cotangents, sums=sums)
        # Each program of the kernel has sums of its own rows.  They are added here, in float32,
        # before the one rounding to the parameter's dtype.
        by_name = {n: t.sum(0).astype(names[n].dtype) for n, t in zip(sums, totals)}
        return (dx, None if alone else dx), tuple(by_name.get(name) for name in names)

    def tangent(options, saved, tangents):
        norm, _ = options
        residual, (_, scale, shift) = saved
        added, (dbias, *outer) = tangents
        moved = [each for each in (*added, dbias) if each is not None]
        # The addition is linear, so its tangent is the sum of the tangents.  Only the norm needs
        # the plain formula, whose derivative JAX knows.
        total = sum((each.astype(residual.dtype) for each in moved), jnp.zeros_like(residual))

        def normed(residual, scale, shift):
            rows = residual.reshape(len(residual), -1)
            operands = Operands(
                rows, None, None, scale.ravel(), None if shift is None else shift.ravel()
            )
            return order(run_residual_norm(norm, operands)[1].reshape(residual.shape))

        operands = residual, scale, shift
        zeros = [jnp.zeros_like(a) if d is None and a is not None else d
                 for a, d in zip((scale, shift), outer)]  # fmt: skip
        return total, jax.jvp(normed, operands, (total, *zeros))[1]

    return derivatives.differentiable(value, backward, forward=forward, tangent=tangent)
