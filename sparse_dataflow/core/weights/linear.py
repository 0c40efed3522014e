"""A projection: a weight and a bias."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from sparse_dataflow.core.ops.wide_sums import broadcast_like
from sparse_dataflow.core.weights.weight import Weight, text_of

PROJECTION_OUTPUT = "projection_output"
"""Checkpoint name of every projection's output, for remat policies."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Linear:
    """y = x W + b.

    Attributes:
      weight: W.
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
