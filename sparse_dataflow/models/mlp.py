"""The MLP of a block: two projections and an activation, or three with a gate."""

import functools
import math
from collections.abc import Callable, Iterable

import jax
from flax import nnx

from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.projections import MLP, ROW_PARALLEL
from sparse_dataflow.kernels.gelu.api import gelu, saving_input, silu
from sparse_dataflow.kernels.sparse_mlp.api import gated_sparse_mlp, sparse_mlp
from sparse_dataflow.models.linear import InputThreshold, Linear, Probe

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_exact": saving_input(functools.partial(jax.nn.gelu, approximate=False)),
    "relu": jax.nn.relu,
    "silu": silu,
}


class Mlp(nnx.Module):
    """An MLP, whose projections are attributes of the module; the config says which it has."""

    mlp_gate: Linear
    mlp_in: Linear
    mlp_out: Linear

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.add(config, (name for name in config.projections if name in MLP), rngs)

    def add(self, config: ModelConfig, names: Iterable[str], rngs: nnx.Rngs) -> None:
        """Draws projections as attributes."""
        for name in names:
            setattr(self, name, Linear(config, name, gain=gain(config, name), rngs=rngs))

    def mlp(self, x_BxTxD, tables, shard):
        """Applies the MLP to gathered tokens; each device of the shard gets its tokens' outputs."""
        fuses = shard.feature_axis is None  # Else devices exchange hidden features.
        if fuses and (y := self._fused_gated_mlp(x_BxTxD, tables)) is not None:
            return self.mlp_out.with_bias(shard.reduce(y))
        if fuses and self._fuses_mlp(tables):
            inside, outside = self.mlp_in.cast(x_BxTxD.dtype), self.mlp_out.cast(x_BxTxD.dtype)
            y = sparse_mlp(
                x_BxTxD,
                inside["values"],
                inside["bias"],
                outside["values"],
                tables["mlp_in"],
                tables["mlp_out"],
            )
            return self.mlp_out.with_bias(shard.reduce(y))
        products = [self.mlp_in(x_BxTxD, tables.get("mlp_in"), shard.reduce_features)]
        if self.config.gated_mlp:
            gate = self.mlp_gate(x_BxTxD, tables.get("mlp_gate"), shard.reduce_features)
            products.append(gate)
        hidden = shard.gather_features(activate(self.config, *products))
        return self.mlp_out(hidden, tables.get("mlp_out"), shard.reduce)

    def _fuses_mlp(self, tables):
        """Returns whether `sparse_mlp` has this MLP: a biased GELU between two plain weights."""
        config, names = self.config, ("mlp_in", "mlp_out")
        return (
            config.activation == "gelu"
            and not config.gated_mlp
            and "mlp_in" in config.biases
            and self.mlp_in.plain_sparse
            and self.mlp_out.plain_sparse
            and not config.quantized
            and not any(_sees_inputs(tables.get(name)) for name in names)
        )

    def _fused_gated_mlp(self, x_BxTxD, tables):
        """Returns mlp_out's product if one kernel has a plain gated MLP of this target; or None."""
        config = self.config
        if not config.gated_mlp or config.quantized:
            return None
        if {"mlp_gate", "mlp_in"} & set(config.biases):
            return None
        layers = [getattr(self, name) for name in MLP]
        if any(_sees_inputs(tables.get(name)) for name in MLP):
            return None
        if not all(layer.plain_sparse for layer in layers):
            return None
        values = [layer.cast(x_BxTxD.dtype)["values"] for layer in layers]
        layouts = [tables[name] for name in MLP]
        return gated_sparse_mlp(x_BxTxD, values, layouts, config.activation)


def _sees_inputs(tables):
    """Returns whether a projection needs its input as an array, which a fused MLP does not have."""
    return isinstance(tables, Probe | InputThreshold)


def activate(config: ModelConfig, hidden: jax.Array, gate: jax.Array | None = None) -> jax.Array:
    """Applies the activation of the MLP, elementwise, to mlp_in's output or to the gate."""
    activation = ACTIVATIONS[config.activation]
    return activation(hidden) if gate is None else hidden * activation(gate)


def gain(config: ModelConfig, projection: str) -> float:
    """Returns the initial scale of a projection.

    It is lower where the projection writes to the residual stream, so that the variance of the
    stream does not grow with depth (GPT-2).
    """
    return 1 / math.sqrt(2 * config.num_layers) if projection in ROW_PARALLEL else 1.0
