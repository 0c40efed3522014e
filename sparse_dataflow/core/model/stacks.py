"""The layouts of a model, and tables and parameters stacked over the layers of each group."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from sparse_dataflow.core.config.layer_groups import join_groups, layer_groups, split_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP
from sparse_dataflow.core.layouts.layout import BlockLayout, LayoutTables, stack_tables
from sparse_dataflow.core.model.experts import expert_layout
from sparse_dataflow.core.model.projection import InputThreshold, layer_weights, projection_layout


def layouts(config: ModelConfig) -> dict[str, list[BlockLayout]]:
    """Returns the initial layouts of each sparse projection, one for each layer.

    Raises:
      UserError: a projection has no balanced layout of its density.
    """
    return {
        projection: [projection_layout(config, projection, i) for i in range(config.num_layers)]
        for projection in config.projections
        if config.linear(projection).kind == "block_sparse"
    }


def check_layouts(config: ModelConfig) -> None:
    """Raises UserError where `layouts` does, but builds only one layer of each group."""
    for group in layer_groups(config):
        layouts(dataclasses.replace(group.model, num_layers=1))
    if config.experts:
        for name in set(config.sparse_projections) & set(MLP):
            expert_layout(config, name)


def layout_tables(layouts: dict[str, list[BlockLayout]]) -> Any:
    """Returns numpy tables stacked over the layers of each group.

    A group is a run of layers with equal numbers of stored blocks.  The layouts of a group have
    tables of equal widths.
    """
    stored = zip(*([layout.nnz for layout in layers] for layers in layouts.values()))
    ends = itertools.accumulate(len(list(run)) for _, run in itertools.groupby(stored))
    runs = list(itertools.pairwise([0, *ends])) or [(0, 0)]
    return join_groups([_stacked_tables(layouts, start, stop) for start, stop in runs])


def _stacked_tables(layouts, start, stop):
    return {
        name: stack_tables([layout.tables() for layout in layers[start:stop]])
        for name, layers in layouts.items()
    }


def with_groups(tables: Any) -> Any:
    """Returns concrete tables with the groups that all layers of a stack share, if they do.

    Other leaves, such as a `Probe`, stay as they are.
    """
    grouped = LayoutTables | InputThreshold
    return join_groups(
        [
            {
                name: stacked.with_groups() if isinstance(stacked, grouped) else stacked
                for name, stacked in group.items()
            }
            for group in split_groups(tables)
        ]
    )


def layouts_from_tables(config: ModelConfig, tables: Any) -> dict[str, list[BlockLayout]]:
    """Returns the layouts of each layer from concrete tables; inverse of `layout_tables`."""
    layouts: dict[str, list[BlockLayout]] = {}
    for group in split_groups(tables):
        for projection, stacked in group.items():
            block = config.linear(projection).block
            layouts.setdefault(projection, []).extend(stacked.layouts(block))
    return layouts


def layers(blocks: Any, tables: Any) -> Iterator[tuple[dict, dict]]:
    """Yields (parameters, tables) of each layer in order, from the stacked trees."""
    for stacked in zip(split_groups(blocks), split_groups(tables), strict=True):
        for i in range(len(jax.tree.leaves(stacked[0])[0])):
            yield jax.tree.map(lambda leaf, i=i: leaf[i], stacked)


def weights(config: ModelConfig, of_model: Any) -> Iterator[dict]:
    """Yields the `layer_weights` of each layer in order, from `ModelWeights`."""
    for params, layouts in layers(of_model.merged["blocks"], of_model.tables):
        yield layer_weights(config, params, layouts)


def stacked_layers(config: ModelConfig, trees: Sequence) -> Any:
    """Stacks numpy trees, one for each layer, like the blocks of the config."""
    return join_groups(
        [
            jax.tree.map(lambda *leaves: np.stack(leaves), *trees[start:stop])
            for start, stop in ((g.layers.start, g.layers.stop) for g in layer_groups(config))
        ]
    )
