"""The Walsh-Hadamard transform of consecutive features, as input of a block-sparse weight.

A block-sparse weight with large blocks and a low density reads few sets of consecutive features.
After the transform, every feature mixes `width` features, so a stored block depends on `width`
features instead of on its own side.  The transform has no parameters.
"""

import jax
import jax.numpy as jnp

from sparse_dataflow.core.ops.hadamard import factors


def hadamard(x: jax.Array, width: int) -> jax.Array:
    """Transform every `width` consecutive features: [..., features], same shape and dtype.

    The matrix is Sylvester's, orthonormal and symmetric: it is its own inverse and transpose.

    Args:
      x: float [..., features], features a multiple of `width`.
      width: a power of 2.
    """
    import scipy.linalg  # Takes long to import, and most models have no transform.

    outer, inner = factors(width)
    signs = lambda size: jnp.asarray(scipy.linalg.hadamard(size), x.dtype)  # noqa: E731
    groups = x.reshape(-1, outer, inner)
    # H of a * b is the Kronecker product of H of a and H of b.  So two products with small matrices
    # cost width * (a + b) instead of width^2.
    mixed = jnp.einsum("gab,bc->gac", groups, signs(inner))
    mixed = jnp.einsum("gac,ad->gdc", mixed, signs(outer))
    return (mixed * width**-0.5).reshape(x.shape)
