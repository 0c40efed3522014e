"""A kind of weight of somebody else: the Kronecker product of two small matrices."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from sparse_dataflow.core.weights.kind import LEAF, MATRIX, Leaf, Weight, register


def _halves(side: int) -> tuple[int, int]:
    """The two divisors of a number that are nearest to its root."""
    first = max(n for n in range(1, math.isqrt(side) + 1) if side % n == 0)
    return first, side // first


@register
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Kronecker(Weight):
    """W[(i, k), (j, l)] = first[i, j] second[k, l]."""

    kind = "kronecker"
    words = "Kronecker products"
    offers = frozenset({"rank"})

    first: Any = dataclasses.field(metadata={LEAF: Leaf(MATRIX, has_muon=True)})
    second: Any = dataclasses.field(
        metadata={LEAF: Leaf(MATRIX, columns=(("fsdp",),), rows=((), ("fsdp",)), has_muon=True)}
    )

    def __rmatmul__(self, x):
        first, second = self.first.astype(x.dtype), self.second.astype(x.dtype)
        grid = x.reshape(*x.shape[:-1], first.shape[0], second.shape[0])
        return jnp.einsum("...ik,ij,kl->...jl", grid, first, second).reshape(*x.shape[:-1], -1)

    def dense(self):
        product = jnp.einsum("...ij,...kl->...ikjl", self.first, self.second)
        sides = (
            self.first.shape[-2] * self.second.shape[-2],
            self.first.shape[-1] * self.second.shape[-1],
        )
        return product.reshape(*self.first.shape[:-2], *sides)

    @classmethod
    def shapes(cls, spec, sides):
        inputs, outputs = map(_halves, sides)
        return {"first": (inputs[0], outputs[0]), "second": (inputs[1], outputs[1])}

    @classmethod
    def draw(cls, spec, sides, gain, normal, layout=None):
        shapes = cls.shapes(spec, sides)
        return {
            "first": normal(shapes["first"], gain / math.sqrt(shapes["first"][0])),
            "second": normal(shapes["second"], 1 / math.sqrt(shapes["second"][0])),
        }
