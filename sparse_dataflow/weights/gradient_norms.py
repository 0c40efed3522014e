"""Block norms of the gradient of a weight if it were dense, of one product."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

SumCopies = Callable[[jax.Array], jax.Array]
"""Sums a dense gradient over the devices that compute with copies of its weight."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def with_gradient_norms(
    y: jax.Array,
    x: jax.Array,
    norms: jax.Array,
    axes: tuple[str, ...] = (),
    sum_copies: SumCopies | None = None,
) -> jax.Array:
    """Returns `y`, a product with `x`; see `weight.Probed` for the gradient of `norms`."""
    return y


def _forward(y, x, norms, axes, sum_copies):
    return y, (x, norms)


def _backward(axes, sum_copies, saved, dy):
    x, norms = saved
    wide = jnp.promote_types(x.dtype, jnp.float32)
    gradient = lax.dot_general(
        x.reshape(-1, x.shape[-1]),
        dy.reshape(-1, dy.shape[-1]),
        (((0,), (0,)), ((), ())),
        preferred_element_type=wide,
    )
    if axes:
        gradient = lax.psum(gradient, axes)
    if sum_copies is not None:
        gradient = sum_copies(gradient)
    in_blocks, out_blocks = norms.shape
    blocks = gradient.reshape(in_blocks, len(gradient) // in_blocks, out_blocks, -1)
    block_norms = jnp.sqrt(jnp.sum(jnp.square(blocks), axis=(1, 3)))
    return dy, jnp.zeros_like(x), block_norms.astype(norms.dtype)


with_gradient_norms.defvjp(_forward, _backward)
