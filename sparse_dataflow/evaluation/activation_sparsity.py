"""Activation sparsity without training: small inputs of the projections count as zeros.

TEAL (arXiv 2408.14690, section 4): each input tensor of each layer has a level, the quantile of its
magnitudes on calibration tokens at the wanted share of zeros. The share is one number, or one for
each projection, as `experiments.density_search` chooses it. Embedding and output layer are not
thresholded.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.layer_groups import (
    join_groups,
    layer_groups,
    layer_model,
    split_groups,
)
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.model import gpt, partition, stacks
from sparse_dataflow.core.model.projection import with_threshold
from sparse_dataflow.core.ops.attention.attention_op import self_attention
from sparse_dataflow.core.ops.hadamard.transform import hadamard
from sparse_dataflow.core.weights.kind import THRESHOLD
from sparse_dataflow.data.cache import TokenArray
from sparse_dataflow.evaluation.trained import Model
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.pruning.inputs import observed_block

CALIBRATION_TOKENS = 1024
"""Tokens that levels are the quantiles of, at most."""

LONGEST_WINDOW = 256
"""Tokens of a calibration window, at most; windows of several documents are more varied."""

Levels = dict[str, jax.Array]
"""Projection -> float32 [], the largest magnitude of an input that counts as zero."""

Share = float | Mapping[str, float]
"""Share of the inputs that are to count as zeros, in [0, 1): of all projections, or by projection;
others have none."""


def share_words(share: Share) -> str:
    """Returns such as "40% of each projection's inputs", for sentences."""
    if not isinstance(share, Mapping):
        return f"{share:.0%} of each projection's inputs"
    return ", ".join(f"{number:.0%} of the inputs of {name}" for name, number in share.items())


def with_thresholds(model: Model, tokens: TokenArray, share: Share) -> Model:
    """Returns the model with a threshold at the inputs of each projection of each layer.

    Whatever applies the model's parameters applies the thresholds: scoring and generation on one
    device.

    Args:
      tokens: int [tokens], training tokens; windows at equal distances are the calibration set.
      share: see `Share`.

    Raises:
      UserError: the model has experts, or not a projection of the share.
    """
    config, groups = model.model, []
    config.refuse_additions("Activation sparsity", "a share of 0")
    layers = stacks.weights(config, model.params)
    windows = calibration_windows(tokens, model.context)
    levels = input_levels(config, model.params["embed"], layers, windows, share)
    blocks = split_groups(model.params["blocks"])
    for group, modules in zip(layer_groups(config), blocks, strict=True):
        group_levels = levels[group.layers.start : group.layers.stop]
        joined = {
            name: np.stack([layer[name] for layer in group_levels]) for name in group_levels[0]
        }
        thresholds = {name: {THRESHOLD: level} for name, level in joined.items()}
        groups.append(partition.merged(thresholds, modules))
    params = {**model.params, "blocks": join_groups(groups)}
    return dataclasses.replace(model, params=params)


def calibration_windows(tokens: TokenArray, context: int) -> np.ndarray:
    """Returns int32 [B, T] tokens: windows at equal distances, `CALIBRATION_TOKENS` in all."""
    length = min(context, LONGEST_WINDOW, len(tokens))
    starts = np.linspace(0, len(tokens) - length, CALIBRATION_TOKENS // length).astype(int)
    return np.stack([np.asarray(tokens[start : start + length], np.int32) for start in starts])


def input_levels(
    config: ModelConfig,
    embed: dict,
    layers: Iterable[dict],
    tokens: ArrayLike,
    share: Share,
    *,
    attend: Callable = self_attention,
    positions: ArrayLike | None = None,
) -> list[Levels]:
    """Returns the levels of each layer, with the earlier thresholds applied.

    Of each input at least the share counts as zeros, and more only where magnitudes are equal.
    Only one layer's inputs are in memory at a time.

    Args:
      embed: parameters of the embedding section.
      layers: `layer_weights` of each layer.
      tokens: int32 [B, T] calibration tokens.
      share: see `Share`.
      attend: see `gpt.Block`.
      positions: int32 [B, T] positions of the tokens; None is 0 to T - 1.

    Raises:
      UserError: the model has experts, or not a projection of the share.
    """
    if config.experts:
        raise UserError(
            "The inputs of experts have no thresholds; legal for a model with experts: "
            "activation_sparsity=0."
        )
    batch = Batch(positions=None if positions is None else jnp.asarray(positions))
    x = gpt.embed(config, jax.tree.map(jnp.asarray, embed), jnp.asarray(tokens), batch)
    by_name = share if isinstance(share, Mapping) else dict.fromkeys(config.projections, share)
    config.selected(tuple(by_name), "activation_sparsity")  # Refuses what the model has not.
    ranks = {
        name: math.ceil(by_name.get(name, 0.0) * np.size(tokens) * config.projection_shape(name)[0])
        for name in config.projections
    }
    # Layer by layer: the inputs of a layer are those after the thresholds of the layers before it.
    levels = []
    for i, layer in enumerate(layers):
        weights = jax.tree.map(jnp.asarray, layer)
        x, layer_levels = _apply(layer_model(config, i), attend, ranks, weights, x, batch)
        levels.append(jax.device_get(layer_levels))
    return levels


@functools.partial(jax.jit, static_argnames=("model", "attend"))
def _apply(model, attend, ranks, weights, x, batch):
    """Applies a block with its thresholds; returns (output, projection -> level)."""

    def threshold(name, x, linear):
        width = model.linear(name).hadamard
        level = smallest_magnitude(hadamard(x, width) if width else x, ranks[name])
        return level, with_threshold(linear, level)

    return observed_block(model, weights, x, threshold, batch=batch, attend=attend)


def smallest_magnitude(x: jax.Array, rank: ArrayLike) -> jax.Array:
    """Returns the smallest float32 level that at least `rank` magnitudes do not exceed.

    Bisects the bits of the level, 20 times faster than sorting on a CPU: nonnegative floats are
    ordered as their bits are.

    Args:
      x: float array of any shape, in float32 or a narrower dtype.
      rank: int32 [], from 0, whose level is 0, to the size of `x`.
    """
    bits = lax.bitcast_convert_type(jnp.abs(x).astype(jnp.float32), jnp.int32)

    def halve(turn, least):
        """The level has at least the bits of `least`, where fewer than `rank` are below."""
        # From bit 30 down; bit 31, the sign, is 0.
        candidate = least | (1 << (30 - turn))
        return jnp.where(jnp.sum(bits < candidate) < rank, candidate, least)

    return lax.bitcast_convert_type(lax.fori_loop(0, 31, halve, jnp.int32(0)), jnp.float32)
