"""Hidden features of the MLPs that a phase of training leaves out.

The model of such a phase has narrower MLPs (`ModelConfig.d_ff`), so products, gradients and moments
cost what those of a narrower model cost.  What is left out stays in the state, among what is not
trained: in each block a section "left_out", with the arrays of the MLP's projections for these
features alone, and "positions", int32 [left out], their sorted indices in the whole MLP.  No
program reads it.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.model.mlp import draw_mlp

LEFT_OUT, POSITIONS = "left_out", "positions"
"""Section of a block, and its array of indices."""


def draw(config: ModelConfig, key: jax.Array) -> dict[str, jax.Array]:
    """Returns arrays of the section "left_out" of one block, in their shapes."""
    features = draw_mlp(config.left_out_part, nnx.Rngs(params=key))
    return {**features, POSITIONS: jnp.arange(config.left_out, dtype=jnp.int32)}


def is_left_out(path: tuple) -> bool:
    """Returns whether an array at a `jax.tree_util` path is left out of the programs."""
    return any(getattr(key, "key", "") == LEFT_OUT for key in path)
