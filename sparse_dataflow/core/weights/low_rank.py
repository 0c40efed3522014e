"""Products of two factors: as a weight of their own, and as a term beside another weight."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from sparse_dataflow.core.weights.dense import Dense
from sparse_dataflow.core.weights.kind import (
    LEAF,
    MATRIX,
    NUMBER,
    Leaf,
    Weight,
    Wrapper,
    register,
    register_term,
)

if TYPE_CHECKING:
    from sparse_dataflow.core.batch import Array

RANK_MULTIPLE = 8
"""Ranks of at least 16 times this are multiples of it, which matrix units prefer.  The stored
weights then differ from the density's by 1/32 at most."""

SQUARINGS, TINY = 4, 1e-30
"""Squarings in `spectral_bound`, and what it adds to divisors that may be 0."""


@register
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LowRank(Weight):
    """A product of two factors and nothing else.

    Attributes:
      a_factor: float [..., in, r].
      b_factor: float [..., r, out].
    """

    kind = "low_rank"
    words = "low-rank weights"
    is_pattern = True
    offers = frozenset({"feature_axis", "tensor_axis"})

    a_factor: "Array" = dataclasses.field(
        metadata={
            LEAF: Leaf(
                MATRIX,
                columns=(("feature", "fsdp"),),
                rows=(("tensor", "fsdp"),),
                input_dim=0,
                has_muon=True,
            )
        }
    )
    b_factor: "Array" = dataclasses.field(
        metadata={
            LEAF: Leaf(
                MATRIX,
                columns=((), ("tensor", "fsdp")),
                rows=((), ("feature", "fsdp")),
                output_dim=1,
                has_muon=True,
            )
        }
    )

    def __rmatmul__(self, x):
        return x @ Dense(self.a_factor) @ Dense(self.b_factor)

    def times_zeros(self, x):
        return Dense(self.a_factor).times_zeros(x) @ Dense(self.b_factor)

    def dense(self):
        return self.a_factor @ self.b_factor

    @classmethod
    def inner_width(cls, spec, sides):
        """Returns the rank at which the factors store `density` times the dense weights, rounded;
        see RANK_MULTIPLE."""
        # The factors have r (in + out) numbers, which are to be density * in * out.
        rank = spec.density * sides[0] * sides[1] / (sides[0] + sides[1])
        multiple = RANK_MULTIPLE if rank >= 16 * RANK_MULTIPLE else 1
        return max(1, multiple * round(rank / multiple))

    @classmethod
    def shapes(cls, spec, sides):
        rank = cls.inner_width(spec, sides)
        return {"a_factor": (sides[0], rank), "b_factor": (rank, sides[1])}

    @classmethod
    def input_row(cls, spec, sides):
        return cls.inner_width(spec, sides)

    @classmethod
    def draw(cls, spec, sides, gain, normal, layout=None):
        """See `Weight`: a_factor has variance r / in² and b_factor gain² / r.

        This is the spectral initialisation of structured weights (arXiv 2406.06248, section 3):
        each factor has a spectral norm of about the root of its outputs over its inputs.  So the
        product has about the spectral norm of a dense weight, and r / in times its variance.
        """
        rank = cls.inner_width(spec, sides)
        shapes = cls.shapes(spec, sides)
        return {
            "a_factor": normal(shapes["a_factor"], math.sqrt(rank) / sides[0]),
            "b_factor": normal(shapes["b_factor"], gain / math.sqrt(rank)),
        }

    @classmethod
    def read_share(cls, leaf, spec, sides, has_muon):
        """See `Weight`: the first factor reads all inputs, the second rank / inputs (arXiv
        2406.06248, section 3).  Under Muon both have the rate of a dense weight."""
        if leaf == "b_factor" and not has_muon:
            return cls.inner_width(spec, sides) / sides[0]
        return 1.0

    @classmethod
    def muon_inputs(cls, matrix, sides):
        return sides[0]

    @classmethod
    def update_scales(cls, params):
        """See `Weight`: Spectron (arXiv 2602.12429, algorithm 1).

        It orthogonalises the momentum of both factors and divides the learning rate by |A| + |B| +
        1, spectral norms.  A product then changes by dA B + A dB + dA dB, whose norm is at most the
        learning rate if that is at most 1.  Here the learning rate is the norm of a dense weight's
        update, RMS sqrt(max(in, out)) times the rate.  The paper estimates the norms by one step of
        power iteration from a stored vector; `spectral_bound` stores nothing.
        """
        (inputs, rank), outputs = params["a_factor"].shape[-2:], params["b_factor"].shape[-1]
        norms = spectral_bound(params["a_factor"]) + spectral_bound(params["b_factor"])
        scale = math.sqrt(max(inputs, outputs)) / (norms + 1)
        sides = {"a_factor": max(inputs, rank), "b_factor": max(rank, outputs)}
        return {name: scale / math.sqrt(side) for name, side in sides.items()}

    @classmethod
    def describe(cls, spec, sides):
        return f"the product of two factors, rank {cls.inner_width(spec, sides)}"

    @classmethod
    def row(cls, spec, sides):
        density = cls.stored(spec, sides) / math.prod(sides)
        rank = f"rank {cls.inner_width(spec, sides):,}"
        return f"{sides[0]}x{sides[1]}", f"{density:.4g}", rank


@register_term("rank")
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PlusLowRank(Wrapper):
    """The base plus a gated low-rank term (arXiv 2112.00029, section 3.3), or an adapter.

    Attributes:
      base: the weight that the term is added to.
      a_kernel: float [..., in, r].
      b_kernel: float [..., r, out].
      gate: float [...].
    """

    base: Weight
    a_kernel: "Array" = dataclasses.field(
        metadata={
            LEAF: Leaf(
                MATRIX, columns=(("feature", "fsdp"),), rows=(("tensor",), ("fsdp",)), input_dim=0
            )
        }
    )
    b_kernel: "Array" = dataclasses.field(
        metadata={
            LEAF: Leaf(
                MATRIX,
                columns=(("fsdp",), ("tensor",)),
                rows=(("fsdp",), ("feature",)),
                output_dim=1,
            )
        }
    )
    gate: Any = dataclasses.field(metadata={LEAF: Leaf(NUMBER)})

    def __rmatmul__(self, x):
        from sparse_dataflow.core.ops.derivatives import broadcast_like

        term = x @ LowRank(self.a_kernel, self.b_kernel)
        return x @ self.base + broadcast_like(self.gate, term) * term

    @classmethod
    def shapes(cls, spec, sides):
        return {"a_kernel": (sides[0], spec.rank), "b_kernel": (spec.rank, sides[1]), "gate": ()}

    @classmethod
    def read_share(cls, leaf, spec, sides, has_muon):
        """See `Weight`; None for the second factor, which sums a constant rank."""
        return 1.0 if leaf == "a_kernel" else None

    @classmethod
    def draw(cls, spec, sides, gain, normal, layout=None):
        """See `Weight`; the term adds nothing at first: b_kernel is 0, the gate 1."""
        import jax.numpy as jnp

        shapes = cls.shapes(spec, sides)
        first = normal(shapes["a_kernel"], 1 / math.sqrt(sides[0]))
        return {"a_kernel": first, "b_kernel": jnp.zeros(shapes["b_kernel"]), "gate": jnp.ones(())}

    def dense(self):
        return self.base.dense() + self.gate[..., None, None] * (self.a_kernel @ self.b_kernel)


def spectral_bound(stack: "Array") -> "Array":
    """Returns an upper bound of the largest singular value of every [m, n] of [..., m, n].

    Returns:
      [..., 1, 1], at most min(m, n)^(1/64) times the singular value: the Frobenius norm of a power
      of the smaller Gram matrix, by SQUARINGS squarings.
    """
    across = stack.swapaxes(-1, -2)
    # The Gram matrix G of the smaller side.  After k squarings the bound is |G^(2^k)|^(1 /
    # 2^(k+1)); powers are divided by their norms, which the bound multiplies back, so nothing
    # overflows.
    power = across @ stack if stack.shape[-2] > stack.shape[-1] else stack @ across
    bound: Any = 1.0
    for squaring in range(SQUARINGS + 1):
        if squaring:
            power = power @ power
        size = (power * power).sum((-2, -1), keepdims=True) ** 0.5
        bound = bound * size ** (0.5 ** (squaring + 1))
        power = power / (size + TINY)
    return bound
