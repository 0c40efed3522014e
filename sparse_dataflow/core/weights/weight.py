"""The kinds of weights: `y = x @ w`, whatever w stores.

A model writes `x @ w` and knows no layout.  `Dense`, `Quantised`, `BlockSparse` and `LowRank` store
a matrix.  A wrapper has a `base` and changes its product: `PlusLowRank`, `Hadamard`,
`Thresholded` and `Probed`.  Every weight is a pytree.  Its arrays have the names that checkpoints
use.

A `BlockLayout` is metadata of the tree, so a program is specialised to it.  `LayoutTables` are
leaves: a program takes any layout of their shapes.  Numpy tables are constants of a program.

Parameters are cast to the dtype of x.  In shapes, ... are the axes of a stack.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from sparse_dataflow.core.config.model import PRECISIONS
from sparse_dataflow.core.layouts.layout import BlockLayout, LayoutTables
from sparse_dataflow.core.ops import quantized
from sparse_dataflow.core.ops.block_sparse_matmul import grouped
from sparse_dataflow.core.ops.block_sparse_matmul.matmul_op import block_sparse_matmul
from sparse_dataflow.core.ops.block_sparse_matmul.xla_static import in_squares
from sparse_dataflow.core.ops.derivatives import broadcast_like
from sparse_dataflow.core.ops.expert_matmul.expert_matmul_op import expert_matmul
from sparse_dataflow.core.ops.hadamard.transform import hadamard
from sparse_dataflow.core.ops.nonzero_rows.nonzero_rows_op import nonzero_rows_matmul
from sparse_dataflow.core.weights.gradient_norms import (
    SumCopies,
    with_dense_gradient,
    with_gradient_norms,
)

jax.tree_util.register_static(BlockLayout)


METADATA = {"static": True}
"""Of a field that is part of the tree's structure."""


class Weight:
    """A matrix [in, out] in some stored form."""

    # Numpy arrays leave `x @ w` to the weight.
    __array_ufunc__ = None

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        """Returns x W: [..., in] -> [..., out], in the dtype of x."""
        raise NotImplementedError

    def __repr__(self):
        return text_of(self)

    def times_zeros(self, x: jax.Array) -> jax.Array:
        """Returns `x @ self` for an x with many zeros, which a kind may skip."""
        return x @ self

    def expert_products(self, x: jax.Array, tiles: jax.Array) -> jax.Array:
        """Multiplies the rows of each expert with its weight, [experts, ...] of a stack.

        Args:
          x: [rows, in], in equal tiles.
          tiles: int32 [tiles], the expert of each.

        Returns:
          [rows, out].
        """
        raise NotImplementedError

    def dense(self) -> jax.Array:
        """Returns W, [..., in, out], of concrete layouts."""
        raise NotImplementedError

    def map_stored(self, function: "Callable[[Weight], Weight]") -> "Weight":
        """Replaces the innermost weight, which no wrapper is."""
        return function(self)


class Wrapper(Weight):
    """A weight that changes the product of its `base`."""

    base: Weight

    def dense(self) -> jax.Array:
        """See `Weight`; W of the base, where the wrapper does not change it."""
        return self.base.dense()

    def map_stored(self, function: Callable[[Weight], Weight]) -> Weight:
        return dataclasses.replace(self, base=self.base.map_stored(function))  # type: ignore[type-var]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dense(Weight):
    """A stored matrix.

    Attributes:
      kernel: float [..., in, out].
      precision: of the product's operands; see `ModelConfig`.
    """

    kernel: Any
    precision: str = dataclasses.field(default=PRECISIONS[0], metadata=METADATA)

    def __rmatmul__(self, x):
        if self.precision == PRECISIONS[0]:
            return _by_rows(x, self.kernel)
        return _by_rows(x, self.kernel, functools.partial(_quantized, precision=self.precision))

    def times_zeros(self, x):
        """See `Weight`; a product of one token reads only the rows of its other inputs."""
        if self.precision != PRECISIONS[0]:
            return x @ self
        return _by_rows(x, self.kernel, nonzero_rows_matmul)

    def expert_products(self, x, tiles):
        return expert_matmul(x[:, None], self.kernel.astype(x.dtype)[:, None], tiles)[:, 0]

    def dense(self):
        return self.kernel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Quantised(Weight):
    """A stored matrix of int8 numbers times a scale for each output, which is not trained.

    Whole numbers up to 127 are exact in every dtype of x, so a product is that of the scaled
    matrix to rounding.

    Attributes:
      kernel: int8 [..., in, out].
      kernel_scale: float32 [..., out].
    """

    kernel: Any
    kernel_scale: Any

    def __rmatmul__(self, x):
        return (_by_rows(x, self.kernel) * self.kernel_scale).astype(x.dtype)

    def dense(self):
        return self.kernel * self.kernel_scale[..., None, :]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockSparse(Weight):
    """Stored blocks of a matrix.

    Attributes:
      values: float [..., nnz, block, block], as `BlockLayout` orders them; under the mesh axis
        "feature" a strip of each block (see `ops.block_sparse_matmul.xla_static`).
      layout: which blocks they are.
      precision: of the product's operands; see `ModelConfig`.
    """

    values: Any
    layout: BlockLayout | LayoutTables
    precision: str = dataclasses.field(default=PRECISIONS[0], metadata=METADATA)

    def __rmatmul__(self, x):
        values, layout = self.values.astype(x.dtype), self.layout
        if isinstance(layout, LayoutTables):
            values, layout = in_squares(values, layout)
        return block_sparse_matmul(x, values, layout, precision=self.precision)

    def expert_products(self, x, tiles):
        """See `Weight`; each group of inputs of a layout of equal groups times its weight."""
        tables, block = self.tables, self.values.shape[-1]
        groups = tables.groups
        assert groups is not None
        weights = grouped.group_values(self.values.astype(x.dtype), tables, groups)
        x = grouped.own_inputs(x, tables, groups, block)
        by_group = grouped.split(x, groups.count, groups.in_run * block).swapaxes(1, 2)
        y = expert_matmul(by_group.reshape(len(x), groups.count, -1), weights, tiles)
        y = y.reshape(len(x), groups.count, -1, groups.out_run * block).swapaxes(1, 2)
        return grouped.among_outputs(y.reshape(len(x), -1), tables, groups, block)

    @property
    def tables(self) -> LayoutTables:
        """The layout's tables, with its groups."""
        if isinstance(self.layout, BlockLayout):
            return self.layout.tables()._replace(groups=self.layout.groups)
        return self.layout

    def dense(self):
        layout = self.layout
        if isinstance(layout, LayoutTables):
            layout = BlockLayout.from_tables(layout, self.values.shape[-1])
        stack, block = self.values.shape[:-3], layout.block
        grid = jnp.zeros((*stack, *layout.mask.shape, block, block), self.values.dtype)
        grid = grid.at[..., layout.rows, layout.cols, :, :].set(self.values)
        return grid.swapaxes(-3, -2).reshape(*stack, layout.in_features, layout.out_features)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LowRank(Weight):
    """A product of two factors and nothing else.

    Attributes:
      a_factor: float [..., in, r].
      b_factor: float [..., r, out].
    """

    a_factor: Any
    b_factor: Any

    def __rmatmul__(self, x):
        return x @ Dense(self.a_factor) @ Dense(self.b_factor)

    def times_zeros(self, x):
        return Dense(self.a_factor).times_zeros(x) @ Dense(self.b_factor)

    def dense(self):
        return self.a_factor @ self.b_factor


@jax.tree_util.register_dataclass
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
    a_kernel: Any
    b_kernel: Any
    gate: Any

    def __rmatmul__(self, x):
        term = x @ LowRank(self.a_kernel, self.b_kernel)
        return x @ self.base + broadcast_like(self.gate, term) * term

    def dense(self):
        return self.base.dense() + self.gate[..., None, None] * (self.a_kernel @ self.b_kernel)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Hadamard(Wrapper):
    """The base multiplies the Walsh-Hadamard transform of x.

    Attributes:
      base: the weight of the transform.
      width: consecutive features that are transformed together, a power of 2.
    """

    base: Weight
    width: int = dataclasses.field(metadata=METADATA)

    def __rmatmul__(self, x):
        return hadamard(x, self.width) @ self.base

    def expert_products(self, x, tiles):
        return self.base.expert_products(hadamard(x, self.width), tiles)

    def dense(self):
        """See `Weight`; the transform is symmetric."""
        return hadamard(self.base.dense().swapaxes(-1, -2), self.width).swapaxes(-1, -2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Thresholded(Wrapper):
    """The base multiplies x with zeros for the inputs up to a level; NaN stays.

    Activation sparsity without training: TEAL, arXiv 2408.14690, section 4.

    Attributes:
      level: float32 [], the largest magnitude that counts as zero.
    """

    base: Weight
    level: Any

    def __rmatmul__(self, x):
        level = self.level.astype(x.dtype)
        return self.base.times_zeros(jnp.where(jnp.abs(x) <= level, 0, x))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Probed(Wrapper):
    """The base, and an input whose gradient is the block norms of the dense gradient.

    Attributes:
      norms: float32 [in_blocks, out_blocks].  No result depends on it.  Its custom "gradient" is
        the Euclidean norm of every block of xᵀ dy, the gradient of the weight if it were dense.
      axes: `shard_map` axes over which the rows of x are sharded.
      sum_copies: sums a gradient over the devices that have copies of the weight; None for none.
    """

    base: Weight
    norms: Any
    axes: tuple[str, ...] = dataclasses.field(default=(), metadata=METADATA)
    sum_copies: SumCopies | None = dataclasses.field(default=None, metadata=METADATA)

    def __rmatmul__(self, x):
        return with_gradient_norms(x @ self.base, x, self.norms, self.axes, self.sum_copies)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class WithDenseGradient(Wrapper):
    """The base, and zeros whose gradient is that of the weight if it were dense.

    Attributes:
      zeros: float32 or wider [in, out].  No result depends on it.  The gradients of several
        products add up; see `gradient_norms.zeros_of_norms` for their norms.
    """

    base: Weight
    zeros: Any

    def __rmatmul__(self, x):
        return with_dense_gradient(x @ self.base, x, self.zeros)


def _by_rows(x, kernel, product=jnp.matmul):
    """Multiplies flattened tokens, because contracting two axes is slower on a CPU."""
    rows = x.reshape(-1, x.shape[-1])
    return product(rows, kernel.astype(x.dtype)).reshape(*x.shape[:-1], -1)


def _quantized(rows, kernel, precision):
    return quantized.matmul(rows, kernel, precision)


def text_of(node: Any) -> str:
    """Returns the repr of a dataclass with arrays as `f32[3,4]`, and without its defaults."""
    fields: Any = dataclasses.fields(node)
    values = {field.name: getattr(node, field.name) for field in fields}
    shown = [f.name for f in fields if values[f.name] is not f.default]
    return f"{type(node).__name__}({', '.join(f'{n}={array_text(values[n])}' for n in shown)})"


_KINDS = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "bool": "bool"}


def array_text(value: Any) -> str:
    """Returns `f32[3,4]` for an array or its shape and dtype, else the repr."""
    if isinstance(value, LayoutTables):
        return f"tables {array_text(value.in_index)}"
    if not hasattr(value, "dtype"):
        return repr(value)
    name = np.dtype(value.dtype).name
    letters = name.rstrip("0123456789")
    kind = _KINDS.get(letters, letters) + name[len(letters) :]
    return f"{kind}[{','.join(map(str, value.shape))}]"


PROJECTION_OUTPUT = "projection_output"
"""Checkpoint name of every projection's output, for remat policies."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Linear:
    """y = x W + b.

    Attributes:
      bias: float [..., out]; None for none.
    """

    weight: Weight
    bias: Any = None

    def __repr__(self):
        return text_of(self)

    def __call__(
        self, x: jax.Array, reduce: Callable[[jax.Array], jax.Array] = lambda y: y
    ) -> jax.Array:
        """Applies the projection: [..., in] -> [..., out], in the dtype of x.

        Args:
          x: the input, or its features for this shard of a weight that is cut by inputs.
          reduce: sums the partial products of a weight that is cut by inputs over its shards.
        """
        return self.plus_bias(reduce(x @ self.weight))

    def plus_bias(self, y: jax.Array) -> jax.Array:
        """Adds the bias, if there is one, and names the output for remat policies."""
        if self.bias is not None:
            y += broadcast_like(self.bias, y)
        return checkpoint_name(y, PROJECTION_OUTPUT)
