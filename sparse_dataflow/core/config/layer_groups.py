"""Layer groups: consecutive layers of equal density, which executors stack and scan.

The parameters of all blocks, and the layout tables, are stacked over the layers of a group:
[layers of the group, ...].  A model without `density_by_depth` has one group, and its tree is this
stacked tree.  Otherwise the tree is a tuple of stacked trees, first group first.

Pure Python: importing this module loads no jax.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from sparse_dataflow.core.config.attention_settings import FULL, ROTATED, SLIDING
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec


class LayerGroup(NamedTuple):
    """Consecutive layers with the same number of stored blocks.

    Attributes:
      layers: layer numbers, from 0.
      model: the model with every layer at the density of this group, so it has one group.
    """

    layers: range
    model: ModelConfig


@functools.cache
def layer_groups(model: ModelConfig) -> tuple[LayerGroup, ...]:
    """Returns the groups of a model in order of depth."""
    if not model.density_by_depth:
        return (LayerGroup(range(model.num_layers), model),)
    result: list[LayerGroup] = []
    for _, run in itertools.groupby(range(model.num_layers), functools.partial(_stored, model)):
        layers = tuple(run)
        uniform = _uniform(model, model.density_by_depth[layers[0]])
        result.append(LayerGroup(range(layers[0], layers[-1] + 1), uniform))
    return tuple(result)


@functools.cache
def group_index(model: ModelConfig, layer: int) -> int:
    """Returns the index of the group of a layer."""
    return next(number for number, group in enumerate(layer_groups(model)) if layer in group.layers)


@functools.cache
def layer_model(model: ModelConfig, layer: int) -> ModelConfig:
    """Returns the model whose every layer is as one layer of `model`.

    Blocks compute with it: it has the layer's density, window and rotary positions.
    """
    rotates = model.rotates(layer)
    model, kind = layer_groups(model)[group_index(model, layer)].model, model.layer_type(layer)
    changes: dict[str, Any] = {}
    # Equal layers have equal models, and so one program.
    if model.layer_types != SLIDING:
        changes["layer_types"] = SLIDING
    if model.rotary_layers != ROTATED:
        changes["rotary_layers"] = ROTATED
    if kind == FULL:
        changes |= {"window": 0, "attention_blocks": "", "rotary_local_base": 0.0}
    elif model.rotary_local_base:
        changes |= {"rotary_base": model.rotary_local_base, "rotary_local_base": 0.0}
        # No scaling: llama3 with the factor 1.
        changes |= {"rotary_scaling": "llama3", "rotary_factor": 1.0, "rotary_factors": ()}
    if model.positions == "rotary" and not rotates:
        changes |= {"positions": "none", "rotary_local_base": 0.0}
    return dataclasses.replace(model, **changes) if changes else model


@functools.cache
def layer_models(model: ModelConfig) -> tuple[ModelConfig, ...]:
    """Returns the different `layer_model`s in order of their first layers."""
    return tuple(dict.fromkeys(layer_model(model, i) for i in range(model.num_layers)))


def layer_model_index(model: ModelConfig, layer: int) -> int:
    """Returns the index of the `layer_model` of a layer among `layer_models`."""
    return layer_models(model).index(layer_model(model, layer))


def layer_linear(model: ModelConfig, projection: str, layer: int) -> LinearSpec:
    """Returns the spec of one projection in one layer."""
    spec = model.linear(projection)
    if not model.density_by_depth or not spec.weight.stores_blocks:
        return spec
    return spec.scaled(model.density_by_depth[layer])


def _stored(model, layer):
    """Returns the degree of each sparse projection of a layer, in ring cells (see `patterns`)."""
    cells = []
    for name in model.sparse_projections:
        spec = layer_linear(model, name, layer)
        ring = math.gcd(*(side // spec.block for side in model.projection_shape(name)))
        cells.append(round(spec.density * ring))
    return cells


def mean_multiplier(model: ModelConfig) -> float:
    """Returns the mean over layers of `density_by_depth`; 1 for a model without it."""
    return sum(model.density_by_depth) / model.num_layers if model.density_by_depth else 1.0


def with_densest_layers(model: ModelConfig) -> ModelConfig:
    """Returns the model with every layer at the density of its densest layer."""
    return _uniform(model, max(model.density_by_depth)) if model.density_by_depth else model


def _uniform(model, multiplier):
    # A `ModelConfig` folds equal multipliers into its specs, and so has one group.
    return dataclasses.replace(model, density_by_depth=(multiplier,) * model.num_layers)


def split_groups(tree: object) -> tuple:
    """Returns the stacked tree of each group of block parameters or of layout tables."""
    return tree if isinstance(tree, tuple) else (tree,)


def join_groups(trees: Sequence) -> Any:
    """Inverse of `split_groups`."""
    return trees[0] if len(trees) == 1 else tuple(trees)


def group_index_of_path(path: Sequence) -> int:
    """Returns the group index of a parameter by its `jax.tree_util` path; 0 outside blocks."""
    for key, after in itertools.pairwise(path):
        if getattr(key, "key", None) == "blocks":
            # A tuple of groups has an index here, a single group none.
            return getattr(after, "idx", 0)
    return 0
