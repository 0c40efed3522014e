"""Pruned layers as they are stored: block-sparse and masked weights in place of zeros."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.config.layer_groups import layer_model
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.optim.optimizers import TrainState
from sparse_dataflow.core.training.transitions import change_model
from sparse_dataflow.pruning.layer_by_layer import layer_arrays
from sparse_dataflow.pruning.rebuild import RebuiltLayer, narrow_layer, stored_of_layer


class StoredLayer(NamedTuple):
    """A layer as it is stored.

    Attributes:
      arrays: its parameters on the host, without layouts.
      layouts: block-sparse projection -> its layout.
    """

    arrays: dict[str, object]
    layouts: dict[str, BlockLayout]

    def with_layouts(self, model: ModelConfig) -> dict[str, object]:
        """Returns the parameters with the layouts, as `stacks.layers` yields them."""
        layouts = {name: layout.tables() for name, layout in self.layouts.items()}
        return stacks.layer_with_layouts(model, self.arrays, layouts)


def sparse_layer(
    new: ModelConfig, before: Mapping[str, object], layer: RebuiltLayer
) -> StoredLayer:
    """Returns a layer of `rebuild.sparser_targets`.

    Args:
      new: the model, with sparser projections.
      before: see `rebuild.stored_before`.
      layer: its dense weights, with zeros.
    """
    dense = dataclasses.replace(new, linears={}, density_by_depth=())
    old, one = (_one_layer(model, layer.number) for model in (dense, new))
    # A stack of one layer, as the change of a model reads and writes stacks.
    params = jax.tree.map(lambda leaf: jnp.array(leaf)[None], layer_arrays(layer.weights))
    state = TrainState(jnp.zeros((), jnp.int32), {"blocks": params}, (), jax.random.key(0))
    # A second reference would keep the dense layer while its blocks are made.
    del params
    stored = stored_of_layer(new, layer.masks, before, layer.number)
    state = change_model(state, old, one, given={name: [each] for name, each in stored.items()})
    layouts = stacks.layouts_of(one, state.rest)
    blocks = merged(state.params, stacks.split_layouts(state.rest)[0])["blocks"]
    return StoredLayer(
        jax.tree.map(lambda leaf: np.asarray(leaf)[0], blocks),
        {name: each[0] for name, each in layouts.items()},
    )


def smaller_layer(old: ModelConfig, layer: RebuiltLayer) -> StoredLayer:
    """Returns a layer of `rebuild.narrow_targets` without what goes."""
    return StoredLayer(narrow_layer(old, layer), {})


def _one_layer(model, number):
    """Returns a model of one layer, which is as one layer of `model`."""
    model = layer_model(model, number)
    return dataclasses.replace(
        model, num_layers=1, density_by_depth=model.density_by_depth[number : number + 1]
    )


def stored_layouts(new: ModelConfig, layouts: Sequence[Mapping[str, BlockLayout]]) -> object:
    """Returns the layouts of all layers as leaves of a tree like the params; () for none."""
    by_name = {name: [layer[name] for layer in layouts] for name in layouts[0]}
    return stacks.stored_layouts(new, by_name)


class InMemory:
    """Takes pruned layers, and keeps them until the model is complete."""

    def __init__(self, model: ModelConfig):
        """Takes the config of the pruned model."""
        self.model = model
        self._layers: list[StoredLayer] = []
        self.masks: list[dict[str, np.ndarray]] = []
        self.errors: dict[str, float] = {}

    def put(self, layer: RebuiltLayer, stored: StoredLayer) -> None:
        """Adds a layer; they come in order."""
        self._layers.append(stored)
        self.masks.append(layer.masks)
        self.errors |= layer.errors

    def params(self, ends: dict) -> dict:
        """Returns the parameters with layouts, and forgets the layers.

        Args:
          ends: see `layer_by_layer.Layers`.
        """
        layouts = stored_layouts(self.model, [layer.layouts for layer in self._layers])
        blocks = stacks.stacked_layers(self.model, [layer.arrays for layer in self._layers])
        self._layers.clear()
        return merged({**ends, "blocks": blocks}, layouts)
