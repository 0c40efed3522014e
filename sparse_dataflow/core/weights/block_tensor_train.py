"""Weights whose every block has a low rank: two block-diagonal factors, a transposition between."""

import dataclasses
import math
from typing import Any

from sparse_dataflow.core.weights.kind import LEAF, MATRIX, Leaf, Weight, register
from sparse_dataflow.files.errors import UserError


@register
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockTensorTrain(Weight):
    """A block tensor train (arXiv 2406.06248, section 3): block (p, t) of the matrix is the product
    of two factors of rank r, and all blocks of an input or of an output share one of them.

    With blocks of side b an output reads every input, at 2 r / b of the dense FLOPs.

    Attributes:
      in_factor: float [..., in / b, b, (out / b) r], which multiplies the features of each input
        block.
      out_factor: float [..., out / b, (in / b) r, b], which sums them for each output block.
    """

    kind = "block_tensor_train"
    words = "block tensor-train weights"
    is_pattern = True
    offers = frozenset({"rank"})

    in_factor: Any = dataclasses.field(
        metadata={
            LEAF: Leaf(
                MATRIX,
                columns=(("fsdp",),),
                rows=(("fsdp",),),
                has_muon=True,
                is_blocks=True,
            )
        }
    )
    out_factor: Any = dataclasses.field(
        metadata={
            LEAF: Leaf(
                MATRIX,
                columns=(("fsdp",),),
                rows=(("fsdp",),),
                output_dim=0,
                has_muon=True,
                is_blocks=True,
            )
        }
    )

    def __rmatmul__(self, x):
        import jax.numpy as jnp

        first, second = self.in_factor.astype(x.dtype), self.out_factor.astype(x.dtype)
        in_blocks, out_blocks = first.shape[0], second.shape[0]
        rows = x.reshape(-1, in_blocks, first.shape[1])
        inner = jnp.einsum("nib,ibs->ins", rows, first)
        tokens = rows.shape[0]  # May be a symbol, of which `len` makes no number.
        # [in blocks, tokens, out blocks, rank] -> [out blocks, tokens, in blocks * rank]: the
        # transposition between the two block-diagonal factors.
        inner = inner.reshape(in_blocks, tokens, out_blocks, -1)
        inner = inner.transpose(2, 1, 0, 3).reshape(out_blocks, tokens, -1)
        return jnp.einsum("ons,osb->nob", inner, second).reshape(*x.shape[:-1], -1)

    def dense(self):
        stack, (in_blocks, block) = self.in_factor.shape[:-3], self.in_factor.shape[-3:-1]
        out_blocks = self.out_factor.shape[-3]
        first = self.in_factor.reshape(*stack, in_blocks, block, out_blocks, -1)
        second = self.out_factor.reshape(*stack, out_blocks, in_blocks, -1, block)
        # [..., in block, input, out block, rank] times [..., in block, out block, rank, output].
        blocks = first.swapaxes(-3, -2) @ second.swapaxes(-4, -3)
        return blocks.swapaxes(-3, -2).reshape(*stack, in_blocks * block, out_blocks * block)

    @classmethod
    def block_rank(cls, spec: Any) -> int:
        """Returns the rank of every block, at which the factors store the density, rounded."""
        return max(1, round(spec.density * spec.block / 2))

    @classmethod
    def shapes(cls, spec, sides):
        inputs, outputs = (side // spec.block for side in sides)
        rank = cls.block_rank(spec)
        return {
            "in_factor": (inputs, spec.block, outputs * rank),
            "out_factor": (outputs, inputs * rank, spec.block),
        }

    @classmethod
    def check(cls, name, spec, sides):
        if any(side % spec.block for side in sides):
            raise UserError(
                f"Blocks of {spec.block} do not divide {name}, {sides[0]} x {sides[1]}; legal: a "
                "--block that divides both."
            )
        if cls.block_rank(spec) > spec.block:
            raise UserError(
                f"density {spec.density:g} is a rank of {cls.block_rank(spec)} in blocks of "
                f"{spec.block}; legal: multiples of {2 / spec.block:g} up to 1."
            )

    @classmethod
    def inner_width(cls, spec, sides):
        return math.prod(side // spec.block for side in sides) * cls.block_rank(spec)

    @classmethod
    def matrices(cls, spec, sides):
        """See `Weight`: every block of both factors."""
        shapes = cls.shapes(spec, sides).values()
        return [(rows, columns) for count, rows, columns in shapes for _ in range(count)]

    @classmethod
    def draw(cls, spec, sides, gain, normal, layout=None):
        shapes = cls.shapes(spec, sides)
        return {
            "in_factor": normal(shapes["in_factor"], 1 / math.sqrt(spec.block)),
            "out_factor": normal(shapes["out_factor"], gain / math.sqrt(shapes["out_factor"][1])),
        }

    @classmethod
    def read_share(cls, leaf, spec, sides, has_muon):
        """See `Weight`: each factor learns by the length that its blocks sum over (arXiv
        2410.02117)."""
        return cls.shapes(spec, sides)[leaf][1] / sides[0]

    @classmethod
    def describe(cls, spec, sides):
        return f"blocks of {spec.block} of rank {cls.block_rank(spec)}"

    @classmethod
    def row(cls, spec, sides):
        density = cls.stored(spec, sides) / math.prod(sides)
        grid = "x".join(str(side // spec.block) for side in sides)
        return grid, f"{density:.4g}", f"rank {cls.block_rank(spec):,}"
