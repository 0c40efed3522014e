"""What the projections of a dense model read."""

from typing import Any

import jax
import jax.numpy as jnp

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.mlp import activate
from sparse_dataflow.core.ops.attention.attention_op import self_attention

from .arms import ALL


def mean_squares(model: ModelConfig, params: Any, tokens: jax.Array) -> dict[str, jax.Array]:
    """Returns projection -> float32 [layers, inputs], the mean square of each input feature.

    Args:
      model: dense, with fused queries, keys and values, and without biases.
      params: of the model.
      tokens: int32 [batch, length].
    """
    x = gpt.embed(model, params["embed"], tokens)
    layers = []
    for weights in stacks.weights(model, params):
        attended: list[jax.Array] = []
        block = gpt.bind_block(model, weights)

        def attend(*heads, attended=attended, **options):
            attended.append(self_attention(*heads, **options))
            return attended[-1]

        middle, after, _ = block.residuals(x, attend=attend)
        normed = block.norm2(middle)
        hidden = activate(model, block.mlp_in(normed))
        read = block.norm1(x), attended[0].reshape(*x.shape[:2], -1), normed, hidden
        layers.append(
            {
                name: jnp.mean(jnp.square(values), (0, 1))
                for name, values in zip(ALL, read, strict=True)
            }
        )
        x = after
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)
