"""The MLP of a block: two projections and an activation, or three with a gate."""

import math
from collections.abc import Iterable

import jax
from flax import nnx

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP, ROW_PARALLEL
from sparse_dataflow.core.model.projection import draw
from sparse_dataflow.core.ops.activation import activation
from sparse_dataflow.core.weights.block_sparse import BlockSparse
from sparse_dataflow.core.weights.weight import Linear, named_output


class Mlp:
    """An MLP, whose projections are attributes; the config says which it has."""

    mlp_gate: Linear
    mlp_in: Linear
    mlp_out: Linear

    def __init__(self, config: ModelConfig, weights: dict):
        """Takes `layer_weights` of the MLP, or of the section that it is a part of."""
        self.config = config
        vars(self).update(weights)

    def mlp(self, x_BxTxD, shard):
        """Applies the MLP to gathered tokens; each device of the shard gets its tokens' outputs."""
        with jax.named_scope("mlp"):
            # With a feature axis, devices exchange hidden features.
            if shard.feature_axis is None and (y := self._fused(x_BxTxD)) is not None:
                return self.mlp_out.plus_bias(shard.reduce(y))
            if not self.config.gated_mlp and self.mlp_in.bias is not None:
                from sparse_dataflow.core.ops.bias_activation.bias_activation_op import (
                    bias_activation,
                )

                hidden = named_output(self.mlp_in.product(x_BxTxD, shard.reduce_features))
                hidden = bias_activation(hidden, self.mlp_in.bias, self.config.activation)
                return self.mlp_out(shard.gather_features(hidden), shard.reduce)
            products = [self.mlp_in(x_BxTxD, shard.reduce_features)]
            if self.config.gated_mlp:
                products.append(self.mlp_gate(x_BxTxD, shard.reduce_features))
            hidden = shard.gather_features(activate(self.config, *products))
            return self.mlp_out(hidden, shard.reduce)

    def _fused(self, x_BxTxD):
        """Returns mlp_out's product if a fused op computes the whole MLP, else None.

        A weight with a probe or a threshold multiplies by itself.
        """
        config = self.config
        weights = [getattr(self, name).weight for name in config.projections if name in MLP]
        if not config.has_fused_mlp or {type(w) for w in weights} != {BlockSparse}:
            return None
        from sparse_dataflow.core.ops.sparse_mlp.mlp_op import gated_sparse_mlp, sparse_mlp

        values = [weight.values.astype(x_BxTxD.dtype) for weight in weights]
        layouts = [weight.layout for weight in weights]
        if config.gated_mlp:
            return gated_sparse_mlp(x_BxTxD, values, layouts, config.activation)
        bias = self.mlp_in.bias.astype(x_BxTxD.dtype)
        return sparse_mlp(
            x_BxTxD, values[0], bias, values[1], *layouts, activation=config.activation
        )


def draw_projections(
    config: ModelConfig, names: Iterable[str], rngs: nnx.Rngs, experts: bool = False
) -> dict:
    """Returns the arrays of projections as `draw` draws them, in this order."""
    return {
        name: draw(config, name, gain=gain(config, name), rngs=rngs, experts=experts)
        for name in names
    }


def draw_mlp(config: ModelConfig, rngs: nnx.Rngs, experts: bool = False) -> dict:
    """Returns the arrays of an MLP, or of all experts."""
    return draw_projections(config, (n for n in config.projections if n in MLP), rngs, experts)


def activate(config: ModelConfig, hidden: jax.Array, gate: jax.Array | None = None) -> jax.Array:
    """Applies the activation of the MLP, elementwise, to mlp_in's output or to the gate."""
    function = activation(config.activation)
    return function(hidden) if gate is None else hidden * function(gate)


def gain(config: ModelConfig, projection: str) -> float:
    """Returns the initial scale of a projection.

    It is lower where the projection writes to the residual stream, so that the variance of the
    stream does not grow with depth (GPT-2).
    """
    return 1 / math.sqrt(2 * config.num_layers) if projection in ROW_PARALLEL else 1.0
