"""Block-sparse weights: square blocks of a matrix, by a layout."""

import dataclasses
import functools
import math
from typing import Any

from sparse_dataflow.core.config.projections import PRECISIONS
from sparse_dataflow.core.layouts.layout import BlockLayout, LayoutTables
from sparse_dataflow.core.weights.kind import (
    ABILITIES,
    LEAF,
    MATRIX,
    METADATA,
    TABLE,
    Leaf,
    Weight,
    register,
)
from sparse_dataflow.files.errors import UserError

TABLE_BYTES_PER_BLOCK = 16
"""Two int32 entries by output block and two by input block, for each stored block."""


@register
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockSparse(Weight):
    """Stored blocks of a matrix.

    Attributes:
      values: float [..., nnz, block, block], as `BlockLayout` orders them; under the mesh axis
        "feature" a strip of each block (see `ops.block_sparse_matmul.xla_static`).
      layout: which blocks they are.
      precision: of the product's operands; see `ModelConfig`.
    """

    kind = "block_sparse"
    words = "block-sparse weights"
    stores_blocks = True
    is_partial = True
    offers = frozenset(ABILITIES) - {"block_outputs", "frozen_int8", "turned_dense"}

    # Stored blocks are sorted by output block, and each head has equally many.
    values: Any = dataclasses.field(
        metadata={
            LEAF: Leaf(
                MATRIX,
                columns=(("tensor", "fsdp"), ("feature",)),
                rows=(("tensor", "fsdp"), (), ("feature",)),
                output_dim=0,
                has_muon=True,
                is_blocks=True,
            )
        }
    )
    layout: BlockLayout | LayoutTables = dataclasses.field(metadata={LEAF: Leaf(TABLE)})
    precision: str = dataclasses.field(default=PRECISIONS[0], metadata=METADATA)

    def __rmatmul__(self, x):
        from sparse_dataflow.core.ops.block_sparse_matmul.matmul_op import block_sparse_matmul
        from sparse_dataflow.core.ops.block_sparse_matmul.xla_static import in_squares

        values, layout = self.values.astype(x.dtype), self.layout
        if isinstance(layout, LayoutTables):
            values, layout = in_squares(values, layout)
        return block_sparse_matmul(x, values, layout, precision=self.precision)

    @property
    def input_groups(self):
        groups = self.layout.groups
        if groups is None or groups.in_parts != groups.count:
            return super().input_groups
        return groups.count, groups.in_run * self.values.shape[-1]

    def expert_products(self, x, tiles):
        """See `Weight`; each group of inputs of a layout of equal groups times its weight."""
        from sparse_dataflow.core.ops.expert_matmul.expert_matmul_op import grouped_products

        return grouped_products(x, self.values.astype(x.dtype), self.layout, tiles)

    def concrete_layout(self) -> BlockLayout:
        """Returns the layout of a weight whose tables are no tracers."""
        if isinstance(self.layout, LayoutTables):
            return BlockLayout.from_tables(self.layout, self.values.shape[-1])
        return self.layout

    def dense(self):
        import jax.numpy as jnp

        layout = self.concrete_layout()
        stack, block = self.values.shape[:-3], layout.block
        grid = jnp.zeros((*stack, *layout.mask.shape, block, block), self.values.dtype)
        grid = grid.at[..., layout.rows, layout.cols, :, :].set(self.values)
        # [..., in_blocks, out_blocks, b, b] -> [..., in_blocks, b, out_blocks, b].
        return grid.swapaxes(-3, -2).reshape(*stack, layout.in_features, layout.out_features)

    @classmethod
    def row_width(cls, spec):
        from sparse_dataflow.core.ops.row_matmul import row_width

        return row_width(spec.block)

    @classmethod
    def shapes(cls, spec, sides):
        return {"values": (round(cls.stored(spec, sides) / spec.block**2), spec.block, spec.block)}

    @classmethod
    def stored(cls, spec, sides):
        return math.prod(sides) * spec.density

    @classmethod
    def table_bytes(cls, spec, sides):
        # Half of the tables are by input block, and as wide as a changing layout needs.
        width = (1 + spec.max_fan_out) / 2
        return cls.stored(spec, sides) / spec.block**2 * width * TABLE_BYTES_PER_BLOCK

    @classmethod
    def draw(cls, spec, sides, gain, normal, layout=None):
        # Inputs that an output sums: outputs have the variance of a dense weight's.
        fan_in = sides[0] * layout.density
        shape = (layout.nnz, layout.block, layout.block)
        return {"values": normal(shape, gain / math.sqrt(fan_in))}

    @classmethod
    def matrices(cls, spec, sides):
        """See `Weight`: the groups of a layout that has them and does not change, else blocks."""
        return [_matrix(spec, *sides)]

    @classmethod
    def read_share(cls, leaf, spec, sides, has_muon):
        return spec.density

    @classmethod
    def describe(cls, spec, sides):
        rank = f", low-rank term of {spec.rank}" if spec.rank else ""
        mixed = f", inputs mixed by {spec.hadamard}" if spec.hadamard else ""
        layout = f"density {spec.density:g}, blocks of {spec.block}, pattern {spec.pattern}"
        return f"{layout} at the start{mixed}{rank}"

    @classmethod
    def row(cls, spec, sides):
        blocks = math.prod(sides) // spec.block**2
        grid = "x".join(str(side // spec.block) for side in sides)
        return grid, f"{spec.density:.4g}", f"{round(spec.density * blocks):,} of {blocks:,}"


@functools.lru_cache(maxsize=256)
def _matrix(spec, inputs, outputs):
    """Returns the inputs and outputs of the matrices of a weight that Muon orthogonalises."""
    # patterns imports the configs, which ask kinds.
    from sparse_dataflow.core.layouts.patterns import make_layout

    if spec.max_fan_out > 1:  # The layout changes.
        return spec.block, spec.block
    try:
        layout = make_layout(spec.pattern, inputs, outputs, spec.block, spec.density)
    except UserError:  # A density that only an estimate has.
        return spec.block, spec.block
    groups = layout.groups
    if groups is None:
        return spec.block, spec.block
    sides = layout.in_blocks // groups.in_parts, layout.out_blocks // groups.out_parts
    return sides[0] * spec.block, sides[1] * spec.block
