"""Norms of each projection's inputs on calibration batches, for activation-aware pruning.

A block of W scores by the norm of its entries |W_ij| times the norm of input feature i (Wanda,
arXiv 2306.11695, section 3, with blocks for single weights). The square of this score is the error
of the output, summed over the tokens, if the block is removed and inputs are uncorrelated.
"""

import functools
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.layer_groups import layer_model
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.stacks import ModelWeights
from sparse_dataflow.core.ops.hadamard.transform import hadamard
from sparse_dataflow.pruning.inputs import observed_block


def input_norms(
    model: ModelConfig,
    weights: ModelWeights,
    batches: Iterable[np.ndarray],
    mixed: Mapping[str, int],
) -> dict[str, np.ndarray]:
    """Returns projection -> float32 [num_layers, in], the norm of each input over all tokens.

    Projections of experts are left out, as their layouts do not follow the weights.
    Only one layer is on the device at a time.

    Args:
      batches: int32 [B, T] token ids.
      mixed: projection -> width of the Hadamard transform of the inputs that are measured.
    """
    widths = tuple(sorted(mixed.items()))
    squares: list[dict[str, np.ndarray]] = []
    for tokens in batches:
        embed = jax.tree.map(jnp.asarray, weights.merged["embed"])
        x = gpt.embed(model, embed, jnp.asarray(tokens))
        batch_squares = []
        layers = stacks.weights(model, weights)
        for i, layer in enumerate(layers):
            x, sums = _apply(layer_model(model, i), widths, jax.tree.map(jnp.asarray, layer), x)
            batch_squares.append(jax.device_get(sums))
        squares = jax.tree.map(np.add, squares, batch_squares) if squares else batch_squares
    return {name: np.sqrt(np.stack([layer[name] for layer in squares])) for name in squares[0]}


@functools.partial(jax.jit, static_argnames=("model", "mixed"))
def _apply(model, mixed, weights, x):
    """Applies a block; returns (output, projection -> sum of its squared inputs [in])."""
    widths = dict(mixed)

    def squares(name, x, linear):
        x = hadamard(x, widths[name]) if widths.get(name) else x
        return jnp.sum(jnp.square(x.astype(jnp.float32)), axis=(0, 1)), linear

    return observed_block(model, weights, x, squares)
