"""What the projections of a dense model read."""

from typing import Any

import jax
import jax.numpy as jnp

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.mlp import activate
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.ops.attention.attention_op import causal_attention

from .arms import ALL


def of_projections(model: ModelConfig, params: Any, tokens: jax.Array) -> dict[str, jax.Array]:
    """Returns projection -> float32 [layers, batch, length, inputs].

    Args:
      model: dense, with fused queries, keys and values.
      params: of the model.
      tokens: int32 [batch, length].
    """
    x = gpt.embed(model, params["embed"], tokens)
    read: dict[str, list] = {name: [] for name in ALL}
    for weights in stacks.weights(model, weights_of(params)):
        attended: list[jax.Array] = []
        block = gpt.bind_block(model, weights)

        def attend(*heads, attended=attended, **options):
            attended.append(causal_attention(*heads, **options))
            return attended[-1]

        middle, after, _ = block.residuals(x, attend=attend)
        normed = block.norm2(middle)
        read["qkv"].append(block.norm1(x))
        read["attn_out"].append(attended[0].reshape(*x.shape[:2], -1))
        read["mlp_in"].append(normed)
        read["mlp_out"].append(activate(model, block.mlp_in(normed)))
        x = after
    return {name: jnp.stack(layers) for name, layers in read.items()}


def mean_squares(model: ModelConfig, params: Any, tokens: jax.Array) -> dict[str, jax.Array]:
    """Returns projection -> float32 [layers, inputs], the mean square of each input feature."""
    read = of_projections(model, params, tokens)
    return {name: jnp.mean(jnp.square(values), (1, 2)) for name, values in read.items()}
