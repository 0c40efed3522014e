"""Inputs of the projections of a block, observed while the block runs."""

from collections.abc import Callable

import jax

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.weights.weight import Linear

Observe = Callable[[str, jax.Array, Linear], tuple[jax.Array, object]]
"""(projection, its input [B, T, in], its weight and bias) -> (observation, what is applied)."""


def observed_block(
    model: ModelConfig, weights: dict, x_BxTxD: jax.Array, observe: Observe, **block: object
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Applies a block and observes the inputs of its projections, except experts.

    Args:
      model: config of the layer's group.
      weights: `layer_weights` of the layer.
      x_BxTxD: residual stream.
      observe: called with each input, in the order of the products.
      **block: further arguments of `gpt.Block.__call__`.

    Returns:
      (output [B, T, D], projection -> observation).
    """
    bound = gpt.bind_block(model, weights)
    observations: dict[str, jax.Array] = {}
    for name in model.projections:
        if not (model.experts and name in MLP):
            setattr(bound, name, _Observed(weights[name], name, observe, observations))
    return bound(x_BxTxD, **block), observations


class _Observed:
    """A projection whose input is observed before it is applied."""

    weight = None  # The fused MLP does not call its projections.

    def __init__(self, linear, name, observe, observations):
        self.linear, self.name, self.observe = linear, name, observe
        self.observations, self.bias = observations, linear.bias

    def __call__(self, x, *arguments):
        return self.plus_bias(self.product(x, *arguments))

    def product(self, x, *arguments):
        self.observations[self.name], linear = self.observe(self.name, x, self.linear)
        return linear.product(x, *arguments)

    def plus_bias(self, y):
        return self.linear.plus_bias(y)
