"""Masked dense weights: any mask of single weights, N of M, or blocks of any side, at dense speed.

The kernel is stored whole, and a product multiplies all of it.  So a mask costs no speed in
training and saves none; a CPU decodes masks of rows with the stored weights alone (`rows`).  A mask
is data: it changes without a new program, and no optimizer state belongs to it.

Each output stores equally many inputs: the best by some score, among all inputs or among every few
neighbouring ones (`LinearSpec.span`; 4 with density 1/2 is 2 of 4).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_dataflow.core.config.projections import PRECISIONS, LinearSpec
from sparse_dataflow.core.weights.dense import KERNEL, Dense
from sparse_dataflow.core.weights.kind import (
    ABILITIES,
    LEAF,
    METADATA,
    TABLE,
    Weight,
    register,
)
from sparse_dataflow.files.errors import UserError

if TYPE_CHECKING:
    from sparse_dataflow.core.batch import Array

MASK = dataclasses.replace(KERNEL, role=TABLE, has_muon=False)
"""Which entries of a kernel count; it is cut as the kernel is."""


@register
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Masked(Weight):
    """A matrix of which only the entries under a mask count.

    Attributes:
      kernel: float [..., in, out]; what is not under the mask is zero, whatever an update does.
      mask: bool [..., in, out].
      precision: of the product's operands; see `ModelConfig`.
    """

    kind = "masked"
    words = "masked weights"
    is_pattern = True
    has_mask = True
    is_partial = True
    offers = frozenset(ABILITIES) - {
        "frozen_int8", "turned_dense", "widths",
    }  # fmt: skip

    kernel: "Array" = dataclasses.field(metadata={LEAF: KERNEL})
    mask: "Array" = dataclasses.field(metadata={LEAF: MASK})
    precision: str = dataclasses.field(default=PRECISIONS[0], metadata=METADATA)

    def as_dense(self) -> Dense:
        """Returns the weight with zeros where the mask has none."""
        return Dense(self.kernel * self.mask.astype(self.kernel.dtype), self.precision)

    def __rmatmul__(self, x):
        return x @ self.as_dense()

    def times_zeros(self, x):
        return self.as_dense().times_zeros(x)

    def expert_products(self, x, tiles):
        return self.as_dense().expert_products(x, tiles)

    def dense(self):
        return self.as_dense().kernel

    @classmethod
    def project(cls, arrays):
        """See `Weight`: zeros where the mask has none, so that a mask may go or grow."""
        import jax.numpy as jnp

        kernel, mask = arrays["kernel"], arrays["mask"]
        xp: Any = np if isinstance(kernel, np.ndarray) else jnp
        return {"kernel": xp.where(mask, kernel, xp.zeros((), kernel.dtype))}

    @classmethod
    def shapes(cls, spec, sides):
        return {"kernel": tuple(sides), "mask": tuple(sides)}

    @classmethod
    def table_bytes(cls, spec, sides):
        return float(math.prod(sides))

    @classmethod
    def input_row(cls, spec, sides):
        return sides[1]

    @classmethod
    def row_width(cls, spec):
        from sparse_dataflow.core.ops.row_matmul import row_width

        return row_width(spec.block_sides[1])

    @classmethod
    def check(cls, name, spec, sides):
        span = spec.span or max(1, sides[0] // spec.block)
        rows = span * spec.density
        if sides[0] % (spec.block * span) or sides[1] % spec.block_sides[1]:
            raise UserError(
                f"{name}: {sides[0]} x {sides[1]} features are not whole blocks of "
                f"{spec.block} x {spec.block_sides[1]}"
                f"{f' in spans of {span}' if spec.span else ''} (sparsity.block, "
                "sparsity.span); legal: sides that divide them."
            )
        if spec.span and abs(rows - round(rows)) > 1e-6:
            raise UserError(
                f"{name}: density {spec.density:g} of a span of {span} is no whole number; legal: "
                f"multiples of 1/{span}."
            )

    @classmethod
    def draw(cls, spec, sides, gain, normal, layout=None):
        """See `Weight`: the mask is drawn too."""
        import jax.numpy as jnp

        # Random scores give a random mask with equally many inputs for each output.
        mask = cls.best(jnp.square(normal(cls.grid(spec, sides), 1.0)), spec)
        kernel = normal(tuple(sides), gain / math.sqrt(sides[0] * spec.density))
        return {"kernel": kernel * mask, "mask": mask}

    @classmethod
    def read_share(cls, leaf, spec, sides, has_muon):
        return spec.density

    @classmethod
    def describe(cls, spec, sides):
        return f"density {spec.density:g}, {_units(spec)} under a mask"

    @classmethod
    def row(cls, spec, sides):
        return f"{sides[0]}x{sides[1]}", f"{spec.density:.4g}", _units(spec)

    @classmethod
    def scores(cls, magnitudes: "Array", spec: LinearSpec) -> "Array":
        """Returns the sums of squares of the blocks: [..., in, out] -> [..., blocks, blocks]."""
        *stack, inputs, outputs = magnitudes.shape
        rows, columns = spec.block_sides
        grid = magnitudes.reshape(*stack, inputs // rows, rows, outputs // columns, columns)
        return (grid * grid).sum((-3, -1))

    @classmethod
    def grid(cls, spec: LinearSpec, sides: tuple[int, int]) -> tuple[int, int]:
        """Returns the numbers of blocks along the inputs and outputs."""
        rows, columns = spec.block_sides
        return sides[0] // rows, sides[1] // columns

    @classmethod
    def block_mask(cls, mask: "Array", spec: LinearSpec) -> "Array":
        """Returns a mask by blocks: [..., in, out] -> [..., in_blocks, out_blocks]."""
        rows, columns = spec.block_sides
        return mask[..., ::rows, ::columns]

    @classmethod
    def entry_mask(cls, blocks: "Array", spec: LinearSpec) -> "Array":
        """Returns a mask by entries: [..., in_blocks, out_blocks] -> [..., in, out]."""
        rows, columns = spec.block_sides
        return blocks.repeat(rows, axis=-2).repeat(columns, axis=-1)

    @classmethod
    def gradient_scores(cls, gradients: Mapping[str, "Array"], spec: LinearSpec) -> "Array":
        """Returns the `scores` of gradients by the names of arrays."""
        return cls.scores(gradients["kernel"], spec)

    @classmethod
    def per_span(cls, spec: LinearSpec, inputs: int) -> tuple[int, int]:
        """Returns the input blocks of a span, and how many of them each output stores.

        Args:
          inputs: input blocks of the weight.
        """
        span = spec.span or inputs
        return span, max(1, round(span * spec.density))

    @classmethod
    def best(cls, scores: "Array", spec: LinearSpec, allowed: "Array | None" = None) -> "Array":
        """Returns the mask of the blocks with the largest scores.

        Args:
          scores: float [..., in_blocks, out_blocks], at least 0.
          allowed: bool [..., in, out], the entries to choose among; None for all.

        Returns:
          bool [..., in, out], with equally many inputs of each output in every span.
        """
        import jax.numpy as jnp

        *stack, inputs, outputs = scores.shape
        span, count = cls.per_span(spec, inputs)
        if allowed is not None:
            scores = jnp.where(cls.block_mask(allowed, spec), scores, -1)
        grid = scores.reshape(*stack, inputs // span, span, outputs)
        # Ranks break ties by the index, so that each output stores exactly `count`.
        ranks = jnp.argsort(jnp.argsort(-grid, axis=-2), axis=-2)
        return cls.entry_mask((ranks < count).reshape(*stack, inputs, outputs), spec)

    @classmethod
    def exchanged(
        cls, mask: Any, norms: Any, growth: Any, spec: LinearSpec, count: Any, gain: float
    ) -> "Array":
        """Returns the mask after the best exchanges of a stored for an absent block.

        A pair is of one output and span.  As in `layouts.evolution.exchange`, it gains the growth
        of the absent block and loses the norm of the stored one, in units of the best sums.

        Args:
          mask: bool [in, out].
          norms: float [in_blocks, out_blocks] of the stored blocks.
          growth: the same of the absent blocks, at least 0.
          count: int32 [], blocks to exchange; fewer where too few are absent.
          gain: weight of growth against norms; 0 drops the smallest blocks.

        Returns:
          bool [in, out], with as many inputs of each output in every span.
        """
        import jax.numpy as jnp

        inputs, outputs = norms.shape
        span = spec.span or inputs
        shape = (inputs // span, span, outputs)
        norms, growth = norms.reshape(shape), growth.reshape(shape)
        stored = cls.block_mask(mask, spec).reshape(shape)
        # The smallest stored blocks of each output and its best absent ones come first.
        losses = jnp.sort(jnp.where(stored, norms, jnp.inf), axis=1)
        profits = -jnp.sort(jnp.where(stored, jnp.inf, -growth), axis=1)
        first = jnp.arange(norms.size) < count
        unit = lambda values: jnp.where(first, values, 0).sum()  # noqa: E731
        loss = losses / jnp.maximum(unit(jnp.sort(losses.ravel())), 1e-30)
        profit = gain * profits / jnp.maximum(unit(-jnp.sort(-profits.ravel())), 1e-30)
        # [spans, span, outputs]: position k pairs the k-th smallest stored block of an output with
        # its k-th best absent one.
        pairs = jnp.isfinite(losses) & jnp.isfinite(profits)
        cost = jnp.where(pairs, loss - profit, jnp.inf).ravel()
        # The `count` pairs of least cost.
        best = jnp.zeros(cost.shape, bool).at[jnp.argsort(cost)].set(first)
        moved = (best & jnp.isfinite(cost)).reshape(shape).sum(1, keepdims=True)

        def chosen(values, where):
            """Returns the `moved` entries of `where` with the smallest values."""
            ordered = jnp.where(where, values, jnp.inf)
            # The rank of each entry, so that exactly `moved` are chosen also where values are
            # equal.
            return where & (jnp.argsort(jnp.argsort(ordered, axis=1), axis=1) < moved)

        after = stored & ~chosen(norms, stored) | chosen(-growth, ~stored)
        return cls.entry_mask(after.reshape(inputs, outputs), spec)


def _units(spec):
    rows, columns = spec.block_sides
    units = "single weights" if rows == columns == 1 else f"blocks of {rows}"
    units += f" x {columns}" * (rows != columns)
    return f"{units}, {round(spec.density * spec.span)} of {spec.span}" if spec.span else units
