"""What of a model is trained, and what is not.

What is trained has gradients, an optimizer state and float32 masters.  The rest is the base of
adapters, what a weight stores beside its numbers, such as a mask, or what a phase leaves out.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import PROJECTIONS
from sparse_dataflow.core.model import adapters
from sparse_dataflow.core.model.left_out import is_left_out
from sparse_dataflow.core.weights.kind import TABLE, leaf_of

ArrayTree = Any
"""A jax tree of arrays, such as parameters or gradients; Python has no static type of it."""


def trained_and_rest(
    model: ModelConfig, params: dict, adapter_scale: float | None = None
) -> tuple[dict, ArrayTree]:
    """Returns a parameter tree as (what is trained, what is not); () for nothing.

    `merged` is the inverse.

    Args:
      adapter_scale: of adapters, which alone are trained then; None for a model without.
    """
    if adapter_scale is not None:
        trained = part(params, functools.partial(adapters.is_trained, model))
        return trained, adapters.frozen(model, params, adapter_scale)

    def is_table(path):
        leaf = leaf_of(model, path)
        return (leaf is not None and leaf.role == TABLE) or is_left_out(path)

    rest = part(params, is_table)
    return (part(params, lambda path: not is_table(path)), rest) if rest else (params, ())


def without_left_out(rest: ArrayTree) -> ArrayTree:
    """Returns what is not trained of a model without what is left out, as programs take it."""
    return part(rest, lambda path: not is_left_out(path)) or () if rest else rest


def legal(model: ModelConfig, params: dict, rest: object) -> dict:
    """Returns trained parameters, or those of a section, as the kinds of their weights keep them
    legal after any update; see `Weight.project`.

    Args:
      rest: see `TrainState`; has the tables of the weights.
    """

    def projected(name, tree, others):
        if isinstance(tree, tuple):
            return tuple(projected(name, *each) for each in zip(tree, others or ((),) * len(tree)))
        if name in PROJECTIONS:
            kind = model.linear(name).weight
            if not kind.leaves().keys() & tree.keys():
                return tree  # Adapters of a weight that is not trained.
            arrays = kind.project({**dict(others or {}), **tree})
            return {n: arrays.get(n, array) for n, array in tree.items()}
        if not isinstance(tree, dict):
            return tree
        return {
            n: projected(n, inner, others[n] if n in others else ()) for n, inner in tree.items()
        }

    return projected("", params, rest)


def part(tree: ArrayTree, fits: Callable[[tuple], bool], path: tuple = ()) -> ArrayTree:
    """Returns the leaves whose path fits; sections without any are left out.

    A layout is one leaf.
    """
    if _is_groups(tree):
        groups = tuple(part(group, fits, path) for group in tree)
        return groups if any(groups) else ()
    parts = {}
    for name, inner in tree.items():
        inside = (*path, jax.tree_util.DictKey(name))
        if type(inner) is dict or _is_groups(inner):
            inner = part(inner, fits, inside)
            if inner:
                parts[name] = inner
        elif fits(inside):
            parts[name] = inner
    return parts


def _is_groups(tree):
    # A map over a model may leave other tuples in place of arrays.
    return type(tree) is tuple and all(type(group) is dict for group in tree)


def merged(params: ArrayTree, base: ArrayTree) -> ArrayTree:
    """Returns one tree with the leaves of both, of which one may be () for nothing."""
    if type(params) is tuple and not params:
        return base
    if type(base) is tuple and base:
        return tuple(map(merged, params, base))
    if not isinstance(base, dict):
        return params
    both = {name: merged(params[name], tree) for name, tree in base.items() if name in params}
    return {**base, **params, **both}
