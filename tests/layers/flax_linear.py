"""Plugin of pytest: `nnx.Linear` is a block-sparse linear that stores all its blocks."""

import math

from flax import nnx
from jax import lax

import sparse_dataflow as sd


def one_product(*operands, **options):
    """Returns the product of `nnx.Linear`, which layers that store all blocks give a caller's.

    Some tests compare bits with flax linen, and sums over blocks are in another order.
    """
    return lax.dot_general(*operands, **options)


class Linear(sd.BlockSparseLinear):
    """`sd.BlockSparseLinear` with the arguments of `nnx.Linear`, and as many parameters."""

    def __init__(self, in_features: int, out_features: int, **options):
        block = math.gcd(in_features, out_features)
        options = {"dot_general": one_product, **options}
        super().__init__(in_features, out_features, density=1.0, block=block, **options)


nnx.Linear = Linear  # type: ignore[misc, assignment]
