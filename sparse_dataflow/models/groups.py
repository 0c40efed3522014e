"""Layers that store equally much, side by side: what executors stack and scan.

Neighbouring layers of equal stored blocks form a group.  The parameters of all blocks, and the
layout tables, are one tree stacked [layers of the group, ...] where there is one group, which is
every model without `density_by_depth`, and else a tuple of such trees, first layers first.

Pure Python: importing this module loads no jax.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from sparse_dataflow.config.model import LinearSpec, ModelConfig


class Group(NamedTuple):
    """Neighbouring layers that store equally much.

    Attributes:
      layers: their numbers, from 0.
      model: the whole model if all its layers were as these; a model of one group.
    """

    layers: range
    model: ModelConfig


@functools.cache
def groups(model: ModelConfig) -> tuple[Group, ...]:
    """The groups of a model, first layers first."""
    if not model.density_by_depth:
        return (Group(range(model.num_layers), model),)
    found: list[Group] = []
    for _, run in itertools.groupby(range(model.num_layers), functools.partial(_stored, model)):
        layers = tuple(run)
        alike = (model.density_by_depth[layers[0]],) * model.num_layers
        own = dataclasses.replace(model, density_by_depth=alike)
        found.append(Group(range(layers[0], layers[-1] + 1), own))
    return tuple(found)


@functools.cache
def of_layer(model: ModelConfig, layer: int) -> int:
    """The number of the group that a layer belongs to."""
    return next(number for number, group in enumerate(groups(model)) if layer in group.layers)


def layer_linear(model: ModelConfig, projection: str, layer: int) -> LinearSpec:
    """The spec of one projection of one layer."""
    spec = model.linear(projection)
    if not model.density_by_depth or spec.kind == "dense":
        return spec
    return spec.scaled(model.density_by_depth[layer])


def _stored(model, layer):
    """What a layer stores of each sparse projection, in cells of its ring (see `patterns`)."""
    cells = []
    for name in model.sparse_projections:
        spec = layer_linear(model, name, layer)
        ring = math.gcd(*(side // spec.block for side in model.projection_shape(name)))
        cells.append(round(spec.density * ring))
    return cells


def mean_multiplier(model: ModelConfig) -> float:
    """What multiplies the density of the model's specs on average over its layers."""
    return sum(model.density_by_depth) / model.num_layers if model.density_by_depth else 1.0


def widest(model: ModelConfig) -> ModelConfig:
    """The model if all its layers were as those that store most."""
    most = max(model.density_by_depth, default=1.0)
    return dataclasses.replace(model, density_by_depth=(most,) * model.num_layers)


def parts(tree: Any) -> tuple:
    """The groups' trees, of the parameters of all blocks or of layout tables."""
    return tree if isinstance(tree, tuple) else (tree,)


def together(trees: Sequence) -> Any:
    """The inverse of `parts`."""
    return trees[0] if len(trees) == 1 else tuple(trees)


def group_of(path: Sequence) -> int:
    """The number of the group that a leaf belongs to, by its path (of `jax.tree_util`) in a tree
    that holds parameters; 0 outside the blocks."""
    for key, after in itertools.pairwise(path):
        if getattr(key, "key", None) == "blocks":
            return getattr(after, "idx", 0)
    return 0
