"""The wrappers of weights, a projection `y = x W + b`, and all kinds as pytrees.

A model writes `x @ w` and knows no layout.  A kind (`kinds`) stores a matrix.  A wrapper has a
`base` and changes its product: an added term, `Hadamard`, `Thresholded` and `Probed`.  Every weight
is a pytree.  Its arrays have the names that checkpoints use.

A layout is a leaf of its weight.  `LayoutTables` are arrays: a program takes any layout of their
shapes.  A `BlockLayout`, or `FixedTables` of several layers, is metadata of the tree, so a program
is specialised to it.  Numpy tables are constants of a program.

Parameters are cast to the dtype of x.  In shapes, ... are the axes of a stack.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from sparse_dataflow.core.config.remat import PROJECTION_OUTPUT
from sparse_dataflow.core.ops.derivatives import broadcast_like
from sparse_dataflow.core.weights.kind import CLASSES, METADATA, ON_REGISTER, Weight, Wrapper

if TYPE_CHECKING:
    from sparse_dataflow.core.weights.gradient_norms import SumCopies


def _as_pytree(weight: type[Weight]) -> None:
    fields: Any = dataclasses.fields(weight)  # type: ignore[arg-type]
    static = [field.name for field in fields if "static" in field.metadata]
    data = [field.name for field in fields if field.name not in static]
    jax.tree_util.register_dataclass(weight, data, static)


for _weight in CLASSES:
    _as_pytree(_weight)
ON_REGISTER.append(_as_pytree)


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
        return self._transformed(x) @ self.base

    def expert_products(self, x, tiles):
        return self.base.expert_products(self._transformed(x), tiles)

    def dense(self):
        """See `Weight`; the transform is symmetric."""
        return self._transformed(self.base.dense().swapaxes(-1, -2)).swapaxes(-1, -2)

    def _transformed(self, x):
        from sparse_dataflow.core.ops.hadamard.transform import hadamard

        return hadamard(x, self.width)


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
    norms: jax.Array
    axes: tuple[str, ...] = dataclasses.field(default=(), metadata=METADATA)
    sum_copies: "SumCopies | None" = dataclasses.field(default=None, metadata=METADATA)

    def __rmatmul__(self, x):
        from sparse_dataflow.core.weights.gradient_norms import with_gradient_norms

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
    zeros: jax.Array

    def __rmatmul__(self, x):
        from sparse_dataflow.core.weights.gradient_norms import with_dense_gradient

        return with_dense_gradient(x @ self.base, x, self.zeros)


def named_output(y: jax.Array) -> jax.Array:
    """Names an output of a projection for remat policies."""
    return checkpoint_name(y, PROJECTION_OUTPUT)


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
        from sparse_dataflow.core.weights.texts import text_of

        return text_of(self)

    def __call__(
        self, x: jax.Array, reduce: Callable[[jax.Array], jax.Array] = lambda y: y
    ) -> jax.Array:
        """Applies the projection: [..., in] -> [..., out], in the dtype of x.

        Args:
          x: the input, or its features for this shard of a weight that is cut by inputs.
          reduce: sums the partial products of a weight that is cut by inputs over its shards.
        """
        return self.plus_bias(self.product(x, reduce))

    def product(
        self, x: jax.Array, reduce: Callable[[jax.Array], jax.Array] = lambda y: y
    ) -> jax.Array:
        """Returns the projection without its bias; arguments as in a call."""
        return reduce(x @ self.weight)

    def plus_bias(self, y: jax.Array) -> jax.Array:
        """Adds the bias, if there is one, and names the output for remat policies."""
        if self.bias is not None:
            y += broadcast_like(self.bias, y)
        return named_output(y)
