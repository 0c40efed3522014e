"""The gradient of activation(x W + bias), for any kernels of the three products."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from sparse_dataflow.core.ops import derivatives
from sparse_dataflow.core.ops.activation import times_derivative


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of the op.

    Attributes:
      activation: follows the product, and its input is saved for the backward pass; None for none.
      tuning: tile sizes of the three products.
      out_features: width of y.
    """

    activation: str | None
    tuning: object
    out_features: int


def differentiable(product: Callable, gradients: Callable) -> Callable:
    """Return the differentiable op (options, x, values, bias, tables) -> y.

    It has first derivatives.  `jax.vmap` runs its kernels once for each element.

    Args:
      product: (options, x, values, bias, tables, keep=...) -> [y], or with `keep`
        [y, pre-activation].
      gradients: (options, x, values, preactivation, dy, tables) -> (dx, dvalues, dz, dbias), where
        dz is the gradient of the pre-activation and dbias its sum over tokens, or None to let XLA
        compute the sum.  Without an activation `preactivation` is None and dz is dy.
    """

    product, gradients = map(derivatives.batchable, (product, gradients))

    def value(options, x, values, bias, tables):
        return product(options, x, values, bias, tables, keep=False)[0]

    def forward(options, x, values, bias, tables):
        results = product(options, x, values, bias, tables, keep=options.activation is not None)
        y, preactivation = results if options.activation is not None else (*results, None)
        return y, (x, values, bias, preactivation, tables)

    def backward(options, saved, dy):
        x, values, bias, preactivation, tables = saved
        dx, dvalues, dz, dbias = gradients(options, x, values, preactivation, dy, tables)
        if bias is None:
            dbias = None
        else:
            # A sum over all tokens, which 16 bits would lose; see `derivatives`.
            dbias = jnp.sum(dz, axis=0, dtype=jnp.float32) if dbias is None else dbias
            dbias = dbias.reshape(bias.shape).astype(bias.dtype)
        return dx, dvalues, dbias, None

    def tangent(options, saved, tangents):
        x, values, _, preactivation, tables = saved
        dx, dvalues, dbias, _ = tangents
        # The tangent is linear in dx, dvalues and dbias, and the activation is not: its derivative
        # at the saved pre-activation multiplies the sum of the three.
        linear = dataclasses.replace(options, activation=None)
        terms = [] if dx is None else [matmul(linear, dx, values, None, tables)]
        terms += [] if dvalues is None else [matmul(linear, x, dvalues, None, tables)]
        terms += [] if dbias is None else [dbias.astype(x.dtype)]
        dz = jnp.broadcast_to(sum(terms), (len(x), options.out_features))
        if preactivation is None:
            return dz
        return times_derivative(options.activation, dz, preactivation)

    matmul = derivatives.differentiable(value, backward, forward=forward, tangent=tangent)
    return matmul
