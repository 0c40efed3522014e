"""GELU, tanh form (arXiv 1606.08415, section 2), whose gradient saves only the input.

Autodiff would also save the tanh: one more pass over the widest activation of a block.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sparse_dataflow.core.ops import derivatives

_SCALE, _CUBIC = 0.7978845608028654, 0.044715  # sqrt(2 / pi), and the paper's constant


def gelu(x: jax.Array) -> jax.Array:
    """Compute 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x³))), elementwise, in x's dtype."""
    return _gelu(x)


def value_and_derivative(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (gelu(x), the derivative at x), elementwise, in x's dtype."""
    # Few operations: the kernels of sparse products spend as long here as in the matrix unit.
    square = x * x
    half = 0.5 + 0.5 * jnp.tanh(x * (_SCALE + _SCALE * _CUBIC * square))
    value = x * half
    slope = half + value * (1 - half) * (2 * _SCALE + 6 * _SCALE * _CUBIC * square)
    return value, slope


def silu_value_and_derivative(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (silu(x), the derivative at x), elementwise, in x's dtype."""
    half = 0.5 + 0.5 * jnp.tanh(0.5 * x)
    value = x * half
    return value, half + value * (1 - half)


def gelu_backward(dy: jax.Array, preactivation: jax.Array) -> jax.Array:
    """Multiply dy by the derivative at `preactivation`, in float32, rounded to dy's dtype."""
    slope = value_and_derivative(preactivation.astype(jnp.float32))[1]
    return (dy.astype(jnp.float32) * slope).astype(dy.dtype)


def saving_input(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Return an elementwise function whose gradient saves only the input."""
    return derivatives.elementwise(function, lambda x, dy: jax.vjp(function, x)[1](dy)[0])


silu = saving_input(jax.nn.silu)
"""x sigmoid(x), elementwise."""

_gelu = derivatives.elementwise(
    lambda x: value_and_derivative(x)[0], lambda x, dy: dy * value_and_derivative(x)[1]
)
