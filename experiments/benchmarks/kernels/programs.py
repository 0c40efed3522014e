"""The three products of a linear layer as compiled programs to be timed, dense and sparse."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.ops.block_sparse_matmul.matmul_op import block_sparse_matmul

from ..benchmark import Program

STATIC = "xla_static"
"""The implementation that is specialised to its layout; others read it from arrays."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """The cases of `kernel_bench`: every layout of a shape with every number of tokens.

    Attributes:
      layouts: (in_features, out_features) -> (pattern, density, layout) triples.
      tokens: rows of x.
      dtype: of x and the weights.
      implementations: of the block-sparse product.
    """

    layouts: Mapping[tuple[int, int], Sequence[tuple[str, float, BlockLayout]]]
    tokens: Sequence[int]
    dtype: str
    implementations: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Case:
    """One product to be timed.

    Attributes:
      layout: which blocks of W exist.
      tokens: rows of x.
      dtype: of x, W and dy.
      product: one of `options.PRODUCTS`.
    """

    layout: BlockLayout
    tokens: int
    dtype: str
    product: str

    @property
    def dense_flops(self) -> int:
        """Floating-point operations of the dense product."""
        shape = self.tokens, self.layout.in_features, self.layout.out_features
        return 2 * int(np.prod(shape)) * (3 if self.product == "forward_backward" else 1)

    @property
    def stored_flops(self) -> int:
        """Floating-point operations at the stored blocks."""
        stored = self.layout.nnz * self.layout.block**2
        return 2 * self.tokens * stored * (3 if self.product == "forward_backward" else 1)


@dataclasses.dataclass(frozen=True)
class Operands:
    """Normal, of unit variance: x [tokens, in], dy [tokens, out] and the dense W [in, out]."""

    x: jax.Array
    dy: jax.Array
    weight: jax.Array

    @classmethod
    def draw(cls, in_features: int, out_features: int, tokens: int, dtype: str) -> "Operands":
        """Drawn on the device from one seed."""
        shapes = (tokens, in_features), (tokens, out_features), (in_features, out_features)
        keys = jax.random.split(jax.random.key(0), len(shapes))
        return cls(*(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes)))

    def stored(self, layout: BlockLayout) -> jax.Array:
        """The stored blocks of the dense W, [nnz, block, block]."""
        grid = self.weight.reshape(layout.in_blocks, layout.block, layout.out_blocks, layout.block)
        return grid.swapaxes(1, 2)[layout.rows, layout.cols]


def dense(product: str, operands: Operands) -> Program:
    """The product as XLA makes it of `x @ W`."""
    return product_of(product, operands, lambda x, weight: x @ weight, operands.weight)


def block_sparse(case: Case, operands: Operands, implementation: str) -> Program:
    """The product at stored blocks."""
    tables, values = case.layout.tables().with_groups(), operands.stored(case.layout)

    def product(x, weight, tables=tables):
        return block_sparse_matmul(x, weight, tables, implementation)

    # As arguments, tables are data in this program as in one whose layout changes.
    data = () if implementation == STATIC else (jax.tree.map(jnp.asarray, tables),)
    return product_of(case.product, operands, product, values, *data)


def product_of(
    product: str, operands: Operands, function: Callable, weight: jax.Array, *data
) -> Program:
    """A product of `function(x, weight, *data)` or of its gradients, compiled.

    Args:
      product: one of `options.PRODUCTS`.
      operands: x and dy.
      function: gives y.
      weight: what else it is differentiable in.
      data: arrays that are not differentiated.
    """

    @jax.jit
    def program(x, weight, dy, *data):
        if product == "forward":
            return function(x, weight, *data)
        if product == "input_gradient":
            return jax.vjp(lambda x: function(x, weight, *data), x)[1](dy)
        if product == "weight_gradient":
            return jax.vjp(lambda weight: function(x, weight, *data), weight)[1](dy)
        y, pull = jax.vjp(lambda x, weight: function(x, weight, *data), x, weight)
        return y, pull(dy)

    arguments = operands.x, weight, operands.dy, *data
    start = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    return Program(lambda: program(*arguments), time.perf_counter() - start)
