"""The weights of a model as one value: what is trained, what is frozen, which blocks are stored."""

import dataclasses
import functools
import hashlib
from typing import Any

import jax
import numpy as np

from sparse_dataflow.core.config.layer_groups import group_index_of_path, split_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.layouts.layout import LayoutTables
from sparse_dataflow.core.model import adapters, stacks
from sparse_dataflow.core.model.projection import layer_weights


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
@dataclasses.dataclass(frozen=True, eq=False)
class ModelWeights:
    """All weights of a model, which executors compute with.

    Attributes:
      params: parameters that are trained; see `gpt`.
      layouts: `Fixed`, or layout tables as leaves, which change without recompiling.
      frozen: parameters that are not trained, such as the base of `adapters`; () for none.
    """

    params: Any
    layouts: Any = dataclasses.field(default_factory=dict)
    frozen: Any = ()

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
        return dataclasses.replace(self, layouts=stacks.with_groups(self.tables))

    def linears(self, config: ModelConfig) -> dict:
        """Returns the `layer_weights` of the weights of one layer."""
        return layer_weights(config, self.params, self.tables)

    def layout_at(self, path: tuple) -> LayoutTables | None:
        """Returns the layouts of the stacked weight at a `jax.tree_util` path of `params`; None for
        what is not block-sparse."""
        if not self.tables or path[-1].key != "values":
            return None
        return split_groups(self.tables)[group_index_of_path(path)][path[-2].key]


def weights_of(params: Any, tables: Any = None, frozen: Any = ()) -> ModelWeights:
    """Returns the weights of a model, whose layouts are fixed if their tables are numpy arrays.

    Without tables, every weight is dense.
    """
    return ModelWeights(params, fixed({} if tables is None else tables), frozen)


def fixed(tables: Any) -> Any:
    """Returns `Fixed` layouts if all of the tables are numpy arrays, else the tables."""
    concrete = all(isinstance(table, np.ndarray) for table in jax.tree.leaves(tables))
    return Fixed(tables) if concrete else tables
