"""The weights of a model as one value, stacked over the layers of each group."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.layouts.layout import (
    BlockLayout,
    FixedTables,
    LayoutTables,
    blocks_text,
    stack_tables,
)
from sparse_dataflow.core.model import adapters
from sparse_dataflow.core.model.partition import part
from sparse_dataflow.core.model.projection import layer_weights
from sparse_dataflow.core.weights.kind import LAYOUT, leaf_of
from sparse_dataflow.core.weights.texts import array_text

Layouts = dict[str, list[BlockLayout]]
"""Block-sparse projection -> its layout in each layer."""


def stored_layouts(model: ModelConfig, layouts: Layouts | None = None) -> Any:
    """Returns layouts as leaves of a tree like the params: numpy tables, stacked over the layers of
    each group; () for a model without any.

    A group is a run of layers with equal numbers of stored blocks.  The layouts of a group have
    tables of equal widths.

    Args:
      layouts: of all layers; those of `model_layouts` if None.
    """
    layouts = model_layouts.layouts(model) if layouts is None else layouts
    stored = zip(*([layout.nnz for layout in layers] for layers in layouts.values()))
    ends = itertools.accumulate(len(list(run)) for _, run in itertools.groupby(stored))
    runs = itertools.pairwise([0, *ends])
    tables = [
        {
            name: stack_tables([layout.tables() for layout in layers[start:stop]])
            for name, layers in layouts.items()
        }
        for start, stop in runs
    ]
    return beside(model, join_groups(tables)) if layouts else ()


def beside(model: ModelConfig, tables: Any) -> Any:
    """Returns {projection: tables} of each group as a tree like the params; () for no tables."""

    def tree(group):
        leaves = {name: {LAYOUT: layout} for name, layout in group.items()}
        expert_tables = {name: leaves.pop(name) for name in MLP if model.experts and name in leaves}
        return {**leaves, "experts": expert_tables} if expert_tables else leaves

    groups = split_groups(tables)
    return {"blocks": join_groups(list(map(tree, groups)))} if any(groups) else ()


def with_layouts(model: ModelConfig, rest: Any, layouts: Layouts | None = None) -> Any:
    """Returns what is not trained of a model with `stored_layouts` in place of its own."""
    others, _ = split_layouts(rest)
    return adapters.merged(others, stored_layouts(model, layouts))


def tables_by_name(tree: Any) -> Any:
    """Returns {projection: its layout as it is stored} of each group; inverse of `beside`.

    Args:
      tree: like the params, or like those of a block.
    """

    def by_name(group):
        modules = {**group, **group.get("experts", {})}
        return {
            name: modules[name][LAYOUT]
            for name in PROJECTIONS
            if name in modules and LAYOUT in modules[name]
        }

    blocks = tree.get("blocks", tree) if tree else {}
    return join_groups(list(map(by_name, split_groups(blocks))))


def with_tables(tree: Any, tables: Any) -> Any:
    """Returns a tree with other tables, as those of `tables_by_name`, in place of its layouts."""

    def replaced(group, layouts):
        return {
            name: {**module, LAYOUT: layouts[name]}
            if name in layouts
            else replaced(module, layouts)
            if name == "experts"
            else module
            for name, module in group.items()
        }

    if not tree:
        return tree
    groups = zip(split_groups(tree["blocks"]), split_groups(tables), strict=True)
    return {**tree, "blocks": join_groups([replaced(*each) for each in groups])}


def layouts_of(model: ModelConfig, tree: Any) -> Layouts:
    """Returns the layouts of each layer from a tree with concrete ones; see `stored_layouts`."""
    layouts: Layouts = {}
    for group in split_groups(tables_by_name(tree)):
        for projection, stacked in group.items():
            block = model.linear(projection).block
            layouts.setdefault(projection, []).extend(opened(stacked).layouts(block))
    return layouts


def is_layout(node: Any) -> bool:
    """Returns whether a node of a tree is a layout."""
    return isinstance(node, LayoutTables | FixedTables)


def opened(layout: Any) -> LayoutTables:
    """Returns the tables of a layout."""
    return layout.tables if isinstance(layout, FixedTables) else layout


def map_layouts(function: Callable[[LayoutTables], Any], tree: Any) -> Any:
    """Returns the tree with `function` of the tables of each layout."""
    return jax.tree.map(
        lambda node: function(opened(node)) if is_layout(node) else node, tree, is_leaf=is_layout
    )


def map_arrays(function: Callable, tree: Any, *others: Any) -> Any:
    """Returns the tree with `function` of each leaf that is of no layout."""
    return jax.tree.map(
        lambda node, *more: node if is_layout(node) else function(node, *more),
        tree,
        *others,
        is_leaf=is_layout,
    )


def with_groups(tree: Any) -> Any:
    """Returns a tree whose concrete layouts are tables with the groups that all layers of a stack
    share, if they do."""
    return map_layouts(LayoutTables.with_groups, tree)


def split_layouts(tree: Any) -> tuple[Any, Any]:
    """Returns a tree as (what is no layout, its layouts); () for nothing."""
    if not tree:
        return (), ()
    others = part(tree, lambda path: path[-1].key != LAYOUT)
    return others or (), part(tree, lambda path: path[-1].key == LAYOUT) or ()


def layers(blocks: Any) -> Iterator[dict]:
    """Yields the parameters of each layer in order, from the stacked trees."""
    for stacked in split_groups(map_layouts(lambda tables: tables, blocks)):
        for i in range(len(jax.tree.leaves(stacked)[0])):
            yield jax.tree.map(lambda leaf, i=i: leaf[i], stacked)


def weights(config: ModelConfig, model_weights: Any) -> Iterator[dict]:
    """Yields the `layer_weights` of each layer in order, from `ModelWeights`."""
    for layer in layers(model_weights.merged["blocks"]):
        yield layer_weights(config, layer)


def stacked_layers(config: ModelConfig, trees: Sequence) -> Any:
    """Stacks numpy trees, one for each layer, like the blocks of the config."""
    return join_groups(
        [
            jax.tree.map(lambda *leaves: np.stack(leaves), *trees[start:stop])
            for start, stop in ((g.layers.start, g.layers.stop) for g in layer_groups(config))
        ]
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ModelWeights:
    """All weights of a model, which executors compute with.

    Attributes:
      params: parameters that are trained; see `gpt`.
      rest: what is not trained, see `model.partition`: layouts, masks, the base of adapters; () for
        nothing.
    """

    params: Any
    rest: Any = ()

    def __repr__(self):
        lines = ["ModelWeights("]
        for path, array in jax.tree_util.tree_leaves_with_path(self.merged):
            if any(getattr(key, "key", "") == LAYOUT for key in path):
                continue
            text = f"  {jax.tree_util.keystr(path, simple=True, separator='/')}={array_text(array)}"
            tables = self.layout_at(path)
            # A map over the weights may have put anything in place of the arrays.
            if tables and np.ndim(array) > 2 and np.ndim(tables.in_index) > 1:
                ins, outs = tables.out_index.shape[-2], tables.in_index.shape[-2]
                *_, stored, block, _ = array.shape
                text += f": {blocks_text(ins, outs, stored, block)}"
            lines.append(text)
        return "\n".join([*lines, ")"])

    @property
    def merged(self) -> dict:
        """All parameters, trained and not, in one tree."""
        return adapters.merged(self.params, self.rest)

    @property
    def has_layouts(self) -> bool:
        """Whether there are block-sparse weights."""
        return any(split_groups(tables_by_name(self.merged)))

    @property
    def has_changing_layouts(self) -> bool:
        """Whether a program that takes the weights does not know their layouts."""
        leaves = jax.tree.leaves(split_layouts(self.merged)[1])
        return any(not isinstance(table, np.ndarray) for table in leaves)

    def with_fixed_layouts(self) -> "ModelWeights":
        """Returns the weights with concrete layouts that cannot change."""
        return self.map_layouts(lambda tables: FixedTables(jax.device_get(tables)))

    def with_groups(self) -> "ModelWeights":
        """Returns the weights with the groups of layouts that have them; see `stacks`."""
        return self.map_layouts(LayoutTables.with_groups)

    def map_layouts(self, function: Callable[[LayoutTables], Any]) -> "ModelWeights":
        """Returns the weights with `function` of each layout."""
        return ModelWeights(*(map_layouts(function, tree) for tree in (self.params, self.rest)))

    def linears(self, config: ModelConfig) -> dict:
        """Returns the `layer_weights` of the weights of one layer."""
        return layer_weights(config, self.merged)

    def layout_at(self, path: tuple) -> LayoutTables | None:
        """Returns the layouts of the stacked weight at a `jax.tree_util` path of `params`; None for
        what is not block-sparse."""
        leaf = leaf_of(path)
        if leaf is None or not leaf.is_blocks:
            return None
        group = split_groups(tables_by_name(self.merged))[group_index_of_path(path)]
        layout = group.get(path[-2].key)
        return None if layout is None else opened(layout)


def weights_of(params: Any, rest: Any = ()) -> ModelWeights:
    """Returns the weights of a model, whose layouts are fixed where their tables are in numpy."""
    weights = ModelWeights(params, rest)
    leaves = jax.tree.leaves(split_layouts(weights.merged)[1])
    is_fixed = all(isinstance(table, np.ndarray) for table in leaves)
    return weights.with_fixed_layouts() if is_fixed else weights
