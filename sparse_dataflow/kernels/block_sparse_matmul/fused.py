"""The gradient of activation(x W + bias) + residual, whichever kernels make the three products."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Options:
    """What is fixed when the op is traced; kernels add what they need.

    Attributes:
      gelu: whether a GELU follows the product.
      keep_preactivation: whether its input is kept for the backward pass, or made again by another
        product.
      tuning: tile sizes of the three products.
    """

    gelu: bool
    keep_preactivation: bool
    tuning: Any


def differentiable(product: Callable, gradients: Callable) -> Callable:
    """The op as a function of (options, x, values, bias, residual, tables).

    Args:
      product: (options, x, values, bias, residual, tables, keep=...) -> [y], or with `keep`
        [y, pre-activation].
      gradients: (options, x, values, preactivation, dy, tables) -> (dx, dvalues, gradient dz of
        what the product made, sum of dz over tokens or None where XLA is to make it); without an
        activation the pre-activation is None and dz is dy.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def matmul(options, x, values, bias, residual, tables):
        return product(options, x, values, bias, residual, tables, keep=False)[0]

    def forward(options, x, values, bias, residual, tables):
        keep = options.gelu and options.keep_preactivation
        y, *kept = product(options, x, values, bias, residual, tables, keep=keep)
        # The residual's gradient is dy; of the array itself only the presence is known again.
        return y, (x, values, bias, residual is not None, kept, tables)

    def backward(options, saved, dy):
        x, values, bias, has_residual, kept, tables = saved
        before = None
        if options.gelu:
            linear = dataclasses.replace(options, gelu=False)
            (before,) = kept or product(linear, x, values, bias, None, tables, keep=False)
        dx, dvalues, dz, dbias = gradients(options, x, values, before, dy, tables)
        if bias is None:
            dbias = None
        else:
            dbias = jnp.sum(dz, axis=0, dtype=jnp.float32) if dbias is None else dbias
            dbias = dbias.reshape(bias.shape).astype(bias.dtype)
        return dx, dvalues, dbias, dy if has_residual else None, None

    matmul.defvjp(forward, backward)
    return matmul
