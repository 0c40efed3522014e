"""The weights of a model as one value, and its layouts, stacked over the layers of each group."""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator, Sequence
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
from sparse_dataflow.core.layouts.layout import (
    BlockLayout,
    LayoutTables,
    blocks_text,
    stack_tables,
)
from sparse_dataflow.core.model import adapters
from sparse_dataflow.core.model.projection import InputThreshold, layer_weights
from sparse_dataflow.core.weights.kind import leaf_of
from sparse_dataflow.core.weights.texts import array_text


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
    for params, tables in layers(of_model.merged["blocks"], of_model.tables):
        yield layer_weights(config, params, tables)


def stacked_layers(config: ModelConfig, trees: Sequence) -> Any:
    """Stacks numpy trees, one for each layer, like the blocks of the config."""
    return join_groups(
        [
            jax.tree.map(lambda *leaves: np.stack(leaves), *trees[start:stop])
            for start, stop in ((g.layers.start, g.layers.stop) for g in layer_groups(config))
        ]
    )


@jax.tree_util.register_static
class Fixed:
    """Layouts that cannot change: metadata of a tree, so programs are specialised to them.

    Compares and hashes by content, once.

    Attributes:
      tables: numpy layout tables, see `stacks.layout_tables`.
    """

    def __init__(self, tables: Any):
        self.tables = tables

    @functools.cached_property
    def content_hash(self) -> str:
        """SHA-256 of the tables and their names, in hex."""
        content = hashlib.sha256()
        for path, table in jax.tree_util.tree_leaves_with_path(self.tables):
            content.update(f"{path}{table.shape}".encode() + np.asarray(table).tobytes())
        return content.hexdigest()

    def __eq__(self, other):
        if self is other:
            return True
        return isinstance(other, Fixed) and self.content_hash == other.content_hash

    def __hash__(self):
        return hash(self.content_hash)

    def __bool__(self):
        return bool(self.tables)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ModelWeights:
    """All weights of a model, which executors compute with.

    Attributes:
      params: parameters that are trained; see `gpt`.
      layouts: `Fixed`, or layout tables as leaves, which change without recompiling.
      frozen: what is not trained, see `model.partition`; () for nothing.
    """

    params: Any
    layouts: Any = dataclasses.field(default_factory=dict)
    frozen: Any = ()

    def __repr__(self):
        lines = ["ModelWeights("]
        for path, array in jax.tree_util.tree_leaves_with_path(self.merged):
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
        """All parameters, trained and frozen, in one tree."""
        return adapters.merged(self.params, self.frozen)

    @property
    def tables(self) -> Any:
        """Layout tables of all layers, in numpy if they are fixed; {} for none."""
        return (self.layouts.tables if isinstance(self.layouts, Fixed) else self.layouts) or {}

    def with_fixed_layouts(self) -> "ModelWeights":
        """Returns the weights with layouts, numpy tables, that cannot change."""
        return dataclasses.replace(self, layouts=Fixed(self.tables))

    def with_groups(self) -> "ModelWeights":
        """Returns the weights with the groups of layouts that have them; see `stacks`."""
        return dataclasses.replace(self, layouts=with_groups(self.tables))

    def linears(self, config: ModelConfig) -> dict:
        """Returns the `layer_weights` of the weights of one layer."""
        return layer_weights(config, self.merged, self.tables)

    def layout_at(self, path: tuple) -> LayoutTables | None:
        """Returns the layouts of the stacked weight at a `jax.tree_util` path of `params`; None for
        what is not block-sparse."""
        leaf = leaf_of(path)
        if not self.tables or leaf is None or not leaf.is_blocks:
            return None
        return split_groups(self.tables)[group_index_of_path(path)].get(path[-2].key)


def weights_of(params: Any, tables: Any = None, frozen: Any = ()) -> ModelWeights:
    """Returns the weights of a model, whose layouts are fixed if their tables are numpy arrays.

    Without tables, every weight is dense.
    """
    return ModelWeights(params, fixed({} if tables is None else tables), frozen)


def fixed(tables: Any) -> Any:
    """Returns `Fixed` layouts if all of the tables are numpy arrays, else the tables."""
    concrete = all(isinstance(table, np.ndarray) for table in jax.tree.leaves(tables))
    return Fixed(tables) if concrete else tables
