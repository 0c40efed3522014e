"""What the projections of a dense model read and give."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.mlp import activate
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.ops.attention.attention_op import causal_attention

from .arms import ALL


class Observed(NamedTuple):
    """What the projections of a model read and give, float32 [layers, batch, length, features].

    Attributes:
      read: projection -> its inputs.
      streams: projection -> the residual stream that its outputs are added to; no entry for those
        inside of a branch.
      given: projection -> its outputs, or the residual stream with them.
    """

    read: dict[str, jax.Array]
    streams: dict[str, jax.Array]
    given: dict[str, jax.Array]


def observed(model: ModelConfig, params: Any, tokens: jax.Array) -> Observed:
    """Returns what the projections read and give.

    Args:
      model: dense, with fused queries, keys and values, and without biases.
      params: of the model.
      tokens: int32 [batch, length].
    """
    x = gpt.embed(model, params["embed"], tokens)
    layers = []
    for weights in stacks.weights(model, weights_of(params)):
        attended: list[jax.Array] = []
        block = gpt.bind_block(model, weights)

        def attend(*heads, attended=attended, **options):
            attended.append(causal_attention(*heads, **options))
            return attended[-1]

        middle, after, _ = block.residuals(x, attend=attend)
        first, normed = block.norm1(x), block.norm2(middle)
        inner = block.mlp_in(normed)
        read = first, attended[0].reshape(*x.shape[:2], -1), normed, activate(model, inner)
        given = block.qkv(first), middle, inner, after
        layers.append(
            Observed(
                dict(zip(ALL, read, strict=True)),
                {"attn_out": x, "mlp_out": middle},
                dict(zip(ALL, given, strict=True)),
            )
        )
        x = after
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)


def mean_squares(model: ModelConfig, params: Any, tokens: jax.Array) -> dict[str, jax.Array]:
    """Returns projection -> float32 [layers, inputs], the mean square of each input feature."""
    read = observed(model, params, tokens).read
    return {name: jnp.mean(jnp.square(values), (1, 2)) for name, values in read.items()}
