"""Which blocks stay: scores, and masks of the weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .arms import Arm


def block_scores(
    arm: Arm, blocks: Mapping[str, object], steps: Sequence[Mapping], rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Returns projection -> float [layers, (experts,) in, out] blocks, higher for what should stay.

    Args:
      arm: `keep` and `block_sides`.
      blocks: parameters of the layers, stacked, without what is cut already.
      steps: what scored chunks returned: "products" and "inputs" of some steps.
      rng: for random blocks.
    """
    scores = {}
    for name in arm.pruned:
        kernel = np.asarray(_holder(blocks, name)[name]["kernel"])
        stored = _sums(np.square(kernel), arm.block_sides) > 0
        if arm.keep == "random":
            score = rng.random(stored.shape)
        elif arm.keep == "saliency":
            products = np.concatenate(
                [_holder(chunk["products"], name)[name]["kernel"] for chunk in steps]
            )
            score = np.square(_sums(products, arm.block_sides)).sum(0)
        elif arm.keep == "activation":
            squares = np.concatenate([chunk["inputs"][name] for chunk in steps]).mean(0)
            score = _sums(np.square(kernel) * squares[..., None], arm.block_sides)
        else:
            score = _sums(np.square(kernel), arm.block_sides)
        scores[name] = np.where(stored, score, -np.inf)
    return scores


def with_blocks(masks: Any, arm: Arm, scores: Mapping[str, np.ndarray], density: float) -> object:
    """Returns masks like the parameters, with the blocks of the highest scores.

    Args:
      masks: like the parameters; a scalar 1 for what is dense.
      arm: `across` and `block_sides`.
      scores: see `block_scores`.
      density: fraction of all blocks that stay.
    """
    if arm.across == "model":
        # Squares of weights of unlike inputs and outputs compare by their share of the projection.
        flat = np.concatenate([_relative(score).ravel() for score in scores.values()])
        least = np.sort(flat)[-round(density * flat.size)]
        chosen = {name: _relative(score) >= least for name, score in scores.items()}
    else:
        chosen = {name: _largest(score, density) for name, score in scores.items()}
    layers = {name: dict(leaf) for name, leaf in masks["blocks"].items()}
    for name, mask in chosen.items():
        inputs, outputs = arm.block_sides
        features = np.repeat(np.repeat(mask, inputs, -2), outputs, -1)
        holder = _holder(layers, name)
        holder[name] = {**holder[name], "kernel": jnp.asarray(features, jnp.float32)}
    return {**masks, "blocks": layers}


def kept_shares(masks: Any, arm: Arm) -> dict[str, float]:
    """Returns projection -> stored fraction of its weights."""
    blocks = masks["blocks"]
    return {name: float(jnp.mean(_holder(blocks, name)[name]["kernel"])) for name in arm.pruned}


def _holder(blocks, name):
    """Returns the mapping that has a projection: of the layers, or of their experts."""
    return blocks["experts"] if name in blocks.get("experts", {}) else blocks


def _largest(score, density):
    """Returns bool like [layers, ..., in_blocks, out_blocks]: the same number in each layer."""
    count = round(density * score[0].size)
    order = np.argsort(score.reshape(len(score), -1), axis=1)
    mask = np.zeros(order.shape, bool)
    np.put_along_axis(mask, order[:, order.shape[1] - count :], True, axis=1)
    return mask.reshape(score.shape)


def _relative(score):
    stored = np.isfinite(score)
    return score / (score[stored].mean() if stored.any() else 1.0)


def _sums(values, sides):
    """Returns sums over blocks of the last two axes."""
    *front, rows, columns = values.shape
    inputs, outputs = sides
    grid = rows // inputs, inputs, columns // outputs, outputs
    return values.reshape(*front, *grid).sum((-3, -1))
