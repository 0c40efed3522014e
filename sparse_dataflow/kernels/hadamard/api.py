"""The Walsh-Hadamard transform of groups of features: what a wide block-sparse weight may read.

A weight of large blocks at a low density reads few groups of neighbouring features.  Transformed,
every feature holds something of all features of its group, so a stored block reads `width` of them
in place of its own side.  The transform has no parameters.
"""

import jax
import jax.numpy as jnp
import scipy.linalg

from sparse_dataflow.kernels.hadamard import factors


def hadamard(x: jax.Array, width: int) -> jax.Array:
    """[..., features] -> the same shape and dtype, every `width` neighbours mixed.

    The matrix is Sylvester's, orthonormal and symmetric, and so its own inverse and transpose.

    Args:
      x: floating; its features are a multiple of `width`.
      width: a power of 2.
    """
    outer, inner = factors(width)
    signs = lambda size: jnp.asarray(scipy.linalg.hadamard(size), x.dtype)  # noqa: E731
    groups = x.reshape(-1, outer, inner)
    mixed = jnp.einsum("gab,bc->gac", groups, signs(inner))
    mixed = jnp.einsum("gac,ad->gdc", mixed, signs(outer))
    return (mixed * width**-0.5).reshape(x.shape)
