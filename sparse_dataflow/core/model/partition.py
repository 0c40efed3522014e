"""What of a model is trained, and what is not.

What is trained has gradients, an optimizer state and float32 masters.  The rest is the base of
adapters, or what a weight stores beside its numbers, such as a mask.
"""

from collections.abc import Callable
from typing import Any

import jax

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.model import adapters
from sparse_dataflow.core.weights.kind import is_table


def trained_and_rest(
    model: ModelConfig, params: Any, adapter_scale: float | None = None
) -> tuple[Any, Any]:
    """Returns a parameter tree as (what is trained, what is not); () for nothing.

    Args:
      adapter_scale: of adapters, which alone are trained then; None for a model without.
    """
    if adapter_scale is None:
        return without_tables(params)
    return adapters.factors(params), adapters.frozen(model, params, adapter_scale)


def without_tables(params: Any) -> tuple[Any, Any]:
    """Returns a parameter tree as (what is trained, the tables of its weights).

    The second tree is () for a model without tables.  `adapters.merged` is the inverse.

    Args:
      params: of a model without adapters.
    """
    if not any(_is_table(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)):
        return params, ()
    return _part(params, lambda path: not _is_table(path)), _part(params, _is_table)


def _is_table(path):
    return is_table(path[-1].key)


def _part(tree: Any, fits: Callable[[tuple], bool], path: tuple = ()) -> Any:
    """Returns the leaves whose path fits; sections without any are left out."""
    if isinstance(tree, tuple):
        return tuple(_part(group, fits, path) for group in tree)
    parts = {}
    for name, part in tree.items():
        inner = (*path, jax.tree_util.DictKey(name))
        if isinstance(part, dict | tuple):
            part = _part(part, fits, inner)
            if jax.tree.leaves(part):
                parts[name] = part
        elif fits(inner):
            parts[name] = part
    return parts
