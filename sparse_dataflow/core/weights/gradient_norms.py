"""The gradient of a weight if it were dense, and its block norms."""

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
    # Before the norms: the norm of a sum is not the sum of norms.
    if axes:
        gradient = lax.psum(gradient, axes)
    if sum_copies is not None:
        gradient = sum_copies(gradient)
    # The product y has its own gradient of x; this one adds nothing to it.
    return dy, jnp.zeros_like(x), _block_norms(gradient, norms)


with_gradient_norms.defvjp(_forward, _backward)


@jax.custom_jvp
def with_dense_gradient(y: jax.Array, x: jax.Array, zeros: jax.Array) -> jax.Array:
    """Returns `y`, a product with `x`; the derivative of `zeros` is that of a dense weight.

    It is linear, so the gradients of several products with one weight add up: of the layers that
    share it, of micro-batches in a scan, and of the examples of `jax.vmap`.

    Args:
      y: [..., out].
      x: [..., in].
      zeros: float32 or wider [in, out]; no result depends on it.
    """
    return y


@with_dense_gradient.defjvp
def _with_dense_gradient_jvp(primals, tangents):
    y, x, _ = primals
    dy, _, dweight = tangents
    product = jnp.matmul(x.astype(dweight.dtype), dweight)
    return y, dy + product.astype(y.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def zeros_of_norms(norms: jax.Array, block: int) -> jax.Array:
    """Returns zeros [..., in, out] whose gradient reaches `norms` as its block norms.

    One call for each weight: its gradient is complete then, so it is the norm of the sum.

    Args:
      norms: float [..., in_blocks, out_blocks].
      block: side of a block.
    """
    *stack, in_blocks, out_blocks = norms.shape
    return jnp.zeros((*stack, in_blocks * block, out_blocks * block), norms.dtype)


def _zeros_forward(norms, block):
    return zeros_of_norms(norms, block), norms


def _zeros_backward(block, norms, gradient):
    return (_block_norms(gradient, norms),)


zeros_of_norms.defvjp(_zeros_forward, _zeros_backward)


def _block_norms(gradient, norms):
    """Returns the Euclidean norms of the blocks of [..., in, out], as `norms`."""
    *stack, in_blocks, out_blocks = norms.shape
    sides = gradient.shape[-2] // in_blocks, gradient.shape[-1] // out_blocks
    blocks = gradient.reshape(*stack, in_blocks, sides[0], out_blocks, sides[1])
    return jnp.sqrt(jnp.sum(jnp.square(blocks), axis=(-3, -1))).astype(norms.dtype)
