"""The activations of `config.activations` as ops.

Their gradients save only the input.  Autodiff would also save the tanh of a GELU: one more pass
over the widest activation of a block.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sparse_dataflow.core.config.activations import ACTIVATIONS
from sparse_dataflow.core.ops import derivatives, dispatch, platforms
from sparse_dataflow.core.ops.derivatives import elementwise


@functools.cache
def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """Return the differentiable elementwise function, in its input's dtype."""
    row = ACTIVATIONS[name]

    def value(x):
        if row.function is not None:
            return row.function(x)
        return value_and_derivative(name, x)[0]

    def times_slope(x, dy):
        if row.function is not None:
            return jax.vjp(row.function, x)[1](dy)[0]
        return dy * value_and_derivative(name, x)[1]

    return elementwise(_on_cpu_wide(value), _on_cpu_wide(times_slope, again=True))


def _on_cpu_wide(function, again=False):
    """Returns the function, which a CPU computes in float32 or wider and rounds once.

    XLA rounds each bfloat16 operation on a CPU, which takes longer than the operation.  See
    `derivatives.again` for a function of the backward pass.
    """

    def wide(x, *others):
        if not dispatch.on(platforms.ROUNDED_OPERATIONS) or x.dtype == derivatives.wide(x.dtype):
            return function(x, *others)
        if again:
            x, others = derivatives.again(x, others)
        operands = (each.astype(derivatives.wide(each.dtype)) for each in (x, *others))
        return function(*operands).astype(x.dtype)

    return wide


def value_and_derivative(name: str, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (y, the derivative at x) of an activation that kernels compute, in x's dtype."""
    function = ACTIVATIONS[name].value_and_derivative
    assert function is not None, name
    return function(x)


def times_derivative(name: str, dy: jax.Array, preactivation: jax.Array) -> jax.Array:
    """Multiply dy by the derivative at `preactivation`, in float32, rounded to dy's dtype."""
    slope = value_and_derivative(name, preactivation.astype(jnp.float32))[1]
    return (dy.astype(jnp.float32) * slope).astype(dy.dtype)
