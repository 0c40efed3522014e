"""The gradient of activation(x W + bias), for any kernels of the three products."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sparse_dataflow.files.errors import UserError


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of the op; an implementation may add its own.

    Attributes:
      gelu: whether a GELU follows the product; its input is then saved for the backward pass.
      tuning: tile sizes of the three products.
      out_features: width of y.
    """

    gelu: bool
    tuning: Any
    out_features: int


def differentiable(product: Callable, gradients: Callable) -> Callable:
    """Return the differentiable op (options, x, values, bias, tables) -> y.

    It has first derivatives, in reverse mode.  `jax.vmap` runs its kernels once for each element.

    Args:
      product: (options, x, values, bias, tables, keep=...) -> [y], or with `keep`
        [y, pre-activation].
      gradients: (options, x, values, preactivation, dy, tables) -> (dx, dvalues, dz, dbias), where
        dz is the gradient of the pre-activation and dbias its sum over tokens, or None to let XLA
        compute the sum.  Without an activation `preactivation` is None and dz is dy.
    """

    product, gradients = batchable(product), batchable(gradients)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def matmul(options, x, values, bias, tables):
        return product(options, x, values, bias, tables, keep=False)[0]

    def forward(options, x, values, bias, tables):
        results = product(options, x, values, bias, tables, keep=options.gelu)
        y, preactivation = results if options.gelu else (*results, None)
        return y, (x, values, bias, preactivation, tables)

    def backward(options, saved, dy):
        x, values, bias, preactivation, tables = saved
        dx, dvalues, dz, dbias = gradients(options, x, values, preactivation, dy, tables)
        if bias is None:
            dbias = None
        else:
            dbias = jnp.sum(dz, axis=0, dtype=jnp.float32) if dbias is None else dbias
            dbias = dbias.reshape(bias.shape).astype(bias.dtype)
        return dx, dvalues, dbias, None

    matmul.defvjp(forward, backward)
    return matmul


def batchable(kernels: Callable) -> Callable:
    """Return `kernels` for use in a custom derivative, where `jax.vmap` then runs them in a loop.

    Args:
      kernels: (options, *arrays, **static) -> arrays; `static` is not traced.

    The result raises a UserError where it is differentiated again.
    """

    def run(options, *arrays, **static):
        call = functools.partial(kernels, options, **static)
        once = jax.custom_jvp(jax.custom_batching.sequential_vmap(call))
        once.defjvp(_refuse_second_derivative)
        return once(*arrays)

    return run


def _refuse_second_derivative(primals, tangents):
    raise UserError(
        "Pallas kernels of block-sparse weights have first derivatives alone; legal for higher "
        "ones: implementation='xla' ('products' for the MLP)."
    )
