"""Dense guides of block-sparse weights (self-guided training, arXiv 2406.16450).

In a guided model every block-sparse projection computes (1 - share) * sparse(x) + share * dense(x).
The dense weight, the guide, begins as a copy of the stored blocks and is trained like any weight.
The share is no parameter: each training step gets it as an argument, see
`layouts.evolution.guide_share`.  Without its guides a model is plain block-sparse; evaluation
always uses it so.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sparse_dataflow.core.config.layer_groups import join_groups, split_groups
from sparse_dataflow.core.config.model import ModelConfig

GUIDE, SHARE = "guide", "guide_share"
"""Leaves of a projection: the dense weight, and its share of the product."""


def without_guides(model: ModelConfig) -> ModelConfig:
    """Returns the plain block-sparse model."""
    return dataclasses.replace(model, guided=False) if model.guided else model


def without_leaves(tree: dict, *leaves: str) -> dict:
    """Returns a tree like the params without these leaves of its projections."""
    groups = [
        {
            name: {leaf: array for leaf, array in module.items() if leaf not in leaves}
            for name, module in group.items()
        }
        for group in split_groups(tree["blocks"])
    ]
    return {**tree, "blocks": join_groups(groups)}


def shares(params: dict, share: jax.Array) -> dict[str, Any]:
    """Returns the leaves SHARE that `params` lack, as `TrainState.frozen` of a step.

    Args:
      params: of a guided model.
      share: float32 [], of the guides.
    """
    groups = [
        {
            name: {SHARE: jnp.full(len(module[GUIDE]), share, jnp.float32)}
            for name, module in group.items()
            if GUIDE in module
        }
        for group in split_groups(params["blocks"])
    ]
    return {"blocks": join_groups(groups)}
