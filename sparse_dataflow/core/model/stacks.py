"""The weights of a model as one value, stacked over the layers of each group."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from sparse_dataflow.core.config.layer_groups import (
    group_index_of_path,
    join_groups,
    layer_groups,
    split_groups,
)
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP, PROJECTIONS
from sparse_dataflow.core.layouts.layout import (
    BlockLayout,
    FixedTables,
    LayoutTables,
    index_tables,
    stack_layouts,
)
from sparse_dataflow.core.model import partition
from sparse_dataflow.core.model.partition import ArrayTree, part
from sparse_dataflow.core.model.projection import layer_weights
from sparse_dataflow.core.weights.kind import LAYOUT, array_path, leaf_of

Layouts = dict[str, list[BlockLayout]]
"""Block-sparse projection -> its layout in each layer."""


def stored_layouts(model: ModelConfig, layouts: Layouts | None = None) -> ArrayTree:
    """Returns layouts as leaves of a tree like the params: numpy tables, stacked over the layers of
    each group; () for a model without any.

    A group is a run of layers with equal numbers of stored blocks.  The layouts of a group have
    tables of equal widths.

    Args:
      layouts: of all layers; those of `model_layouts` if None.
    """
    if layouts is None:
        from sparse_dataflow.core.layouts import model_layouts

        layouts = model_layouts.layouts(model)
    # For each layer, the stored blocks of each projection; runs of equal ones are groups.
    stored = zip(*([layout.nnz for layout in layers] for layers in layouts.values()))
    ends = itertools.accumulate(len(list(run)) for _, run in itertools.groupby(stored))
    runs = itertools.pairwise([0, *ends])
    groups = [
        {name: stack_layouts(each[run]) for name, each in layouts.items()}
        for run in itertools.starmap(slice, runs)
    ]
    return layout_tree(model, join_groups(groups)) if layouts else ()


def layout_tree(model: ModelConfig, layouts: object) -> ArrayTree:
    """Returns `layouts_by_name` as a tree like the params; () for none."""

    def tree(group):
        leaves = {name: {LAYOUT: layout} for name, layout in group.items()}
        expert_layouts = {
            name: leaves.pop(name) for name in MLP if model.experts and name in leaves
        }
        return {**leaves, "experts": expert_layouts} if expert_layouts else leaves

    groups = split_groups(layouts)
    return {"blocks": join_groups(list(map(tree, groups)))} if any(groups) else ()


def layer_with_layouts(model: ModelConfig, layer: dict, layouts: Mapping[str, object]) -> dict:
    """Returns the parameters of a layer with its `layouts_by_name`."""
    return partition.merged(layer, layout_tree(model, layouts)["blocks"]) if layouts else layer


def with_layouts(model: ModelConfig, rest: object, layouts: Layouts | None = None) -> ArrayTree:
    """Returns what is not trained of a model with `stored_layouts` in place of its own."""
    others, _ = split_layouts(rest)
    return partition.merged(others, stored_layouts(model, layouts))


class Place(NamedTuple):
    """Which layers, and which of their projections, a layout is of.

    Attributes:
      group: index of the layer group.
      projection: its name.
    """

    group: int
    projection: str


def place_of(path: tuple) -> Place:
    """Returns the place of an array of a projection by its `jax.tree_util` path."""
    return Place(group_index_of_path(path), array_path(path)[-2].key)


def layouts_by_place(tree: object) -> dict[Place, LayoutTables]:
    """Returns the layouts of a tree like the params, or like those of a layer."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_layout)
    return {place_of(path): index_tables(node) for path, node in nodes if _is_layout(node)}


def layout_of_leaf(
    model: ModelConfig, path: tuple, layouts: Mapping[Place, LayoutTables]
) -> LayoutTables | None:
    """Returns the layout of an array of the params by its `jax.tree_util` path; None for what is no
    stored blocks."""
    leaf = leaf_of(model, path)
    return layouts.get(place_of(path)) if leaf is not None and leaf.is_blocks else None


def layouts_by_name(tree: ArrayTree) -> ArrayTree:
    """Returns {projection: layout} of each group, as checkpoints name them; see `layout_tree`.

    Args:
      tree: like the params, or like those of a layer.
    """
    placed = layouts_by_place(tree)
    groups = split_groups(tree["blocks"] if "blocks" in tree else tree)
    return join_groups(
        [
            {name: placed[place] for name in PROJECTIONS if (place := Place(i, name)) in placed}
            for i in range(max(1, len(groups)))
        ]
    )


def layouts_of(model: ModelConfig, tree: object) -> Layouts:
    """Returns the layouts of each layer from a tree with concrete ones; see `stored_layouts`."""
    layouts: Layouts = {}
    for group in split_groups(layouts_by_name(tree)):
        for projection, stacked in group.items():
            block = model.linear(projection).block
            layouts.setdefault(projection, []).extend(stacked.layouts(block))
    return layouts


def _is_layout(node):
    return isinstance(node, LayoutTables | FixedTables)


def map_layouts(function: Callable[[LayoutTables], object], tree: object) -> ArrayTree:
    """Returns the tree with `function` of each layout."""
    return jax.tree.map(
        lambda node: function(index_tables(node)) if _is_layout(node) else node,
        tree,
        is_leaf=_is_layout,
    )


def map_placed_layouts(function: Callable[[Place, LayoutTables], object], tree: object) -> Any:
    """Returns the tree with `function` of each layout and its place."""
    return jax.tree_util.tree_map_with_path(
        lambda path, node: (
            function(place_of(path), index_tables(node)) if _is_layout(node) else node
        ),
        tree,
        is_leaf=_is_layout,
    )


def map_arrays(function: Callable, tree: object, *others: object) -> ArrayTree:
    """Returns the tree with `function` of each leaf that is of no layout."""
    return jax.tree.map(
        lambda node, *more: node if _is_layout(node) else function(node, *more),
        tree,
        *others,
        is_leaf=_is_layout,
    )


def with_groups(tree: object) -> ArrayTree:
    """Returns a tree whose concrete layouts are tables with the groups that all layers of a stack
    share, if they do."""
    return map_layouts(LayoutTables.with_groups, tree)


def split_layouts(tree: object) -> tuple[ArrayTree, ArrayTree]:
    """Returns a tree as (what is no layout, its layouts); () for nothing."""
    if not tree:
        return (), ()
    others = part(tree, lambda path: path[-1].key != LAYOUT)
    return others or (), part(tree, lambda path: path[-1].key == LAYOUT) or ()


def layers(blocks: object) -> Iterator[dict]:
    """Yields the parameters of each layer in order, from the stacked trees."""
    # `map_layouts` makes index tables of fixed ones, which have no arrays to index.
    for stacked in split_groups(map_layouts(lambda layout: layout, blocks)):
        # The first axis of each leaf is the layers.
        for i in range(len(jax.tree.leaves(stacked)[0])):
            yield jax.tree.map(lambda leaf, i=i: leaf[i], stacked)


def weights(config: ModelConfig, params: dict) -> Iterator[dict]:
    """Yields the `layer_weights` of each layer in order, from params with their layouts."""
    for layer in layers(params["blocks"]):
        yield layer_weights(config, layer)


def stacked_layers(config: ModelConfig, trees: Sequence) -> ArrayTree:
    """Stacks numpy trees, one for each layer, like the blocks of the config."""
    return join_groups(
        [
            jax.tree.map(lambda *leaves: np.stack(leaves), *trees[start:stop])
            for start, stop in ((g.layers.start, g.layers.stop) for g in layer_groups(config))
        ]
    )


def fixed_layouts(tree: object) -> ArrayTree:
    """Returns a tree with concrete layouts that cannot change."""
    return map_layouts(lambda layout: FixedTables(jax.device_get(layout)), tree)


def has_changing_layouts(tree: object) -> bool:
    """Returns whether a program that takes the tree does not know its layouts."""
    layouts = filter(_is_layout, jax.tree.leaves(tree, is_leaf=_is_layout))
    # Fixed layouts have no leaves.
    return any(not isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(list(layouts)))


def weights_of(config: ModelConfig, params: object, rest: object = ()) -> dict:
    """Returns all parameters of a model, trained and not, with the `layer_weights` of each group.

    Layouts are fixed where their tables are in numpy.
    """
    tree = partition.merged(params, rest)
    tree = tree if has_changing_layouts(tree) else fixed_layouts(tree)
    groups = [layer_weights(config, group) for group in split_groups(tree["blocks"])]
    return {**tree, "blocks": join_groups(groups)}
