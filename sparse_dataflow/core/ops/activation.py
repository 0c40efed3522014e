"""The activations of `config.activations` as ops.

Their gradients save only the input.  Autodiff would also save the tanh of a GELU: one more pass
over the widest activation of a block.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sparse_dataflow.core.config.activations import ACTIVATIONS
from sparse_dataflow.core.ops.derivatives import elementwise


@functools.cache
def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """Return the differentiable elementwise function, in its input's dtype."""
    row = ACTIVATIONS[name]
    if row.function is not None:
        function = row.function
        return elementwise(function, lambda x, dy: jax.vjp(function, x)[1](dy)[0])
    return elementwise(
        lambda x: value_and_derivative(name, x)[0],
        lambda x, dy: dy * value_and_derivative(name, x)[1],
    )


def value_and_derivative(name: str, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (y, the derivative at x) of an activation that kernels compute, in x's dtype."""
    function = ACTIVATIONS[name].value_and_derivative
    assert function is not None, name
    return function(x)


def times_derivative(name: str, dy: jax.Array, preactivation: jax.Array) -> jax.Array:
    """Multiply dy by the derivative at `preactivation`, in float32, rounded to dy's dtype."""
    slope = value_and_derivative(name, preactivation.astype(jnp.float32))[1]
    return (dy.astype(jnp.float32) * slope).astype(dy.dtype)
