"""Plugin of pytest: `nnx.Linear` is a block-sparse linear that stores all its blocks."""

import math

from flax import nnx

import sparse_dataflow as sd


class Linear(sd.BlockSparseLinear):
    """`sd.BlockSparseLinear` with the arguments of `nnx.Linear`, and as many parameters."""

    def __init__(self, in_features: int, out_features: int, **options):
        block = math.gcd(in_features, out_features)
        super().__init__(in_features, out_features, density=1.0, block=block, **options)


nnx.Linear = Linear  # type: ignore[misc, assignment]
