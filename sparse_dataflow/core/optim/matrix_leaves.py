"""Which parameters are matrices, and which of them Muon updates, by what a weight's class says."""

from typing import Any

from sparse_dataflow.core.weights.kind import (
    EMBEDDINGS,
    LEAVES,
    MATRIX,
    ROLE_AXES,
    ROUTER,
    leaf_of,
    stored_form,
)

VOCABULARY = ("tokens", "output", "output_bias")
"""Leaves with a row for each token."""


def weight_axes(path: tuple) -> int:
    """Returns the number of axes of one weight of a parameter, after those of its stack.

    Args:
      path: of `jax.tree_util`, in the params or in a section of them.
    """
    if leaf := leaf_of(path):
        return ROLE_AXES[leaf.role]
    return 2 if is_matrix(path) else 1


def is_linear_matrix(path: tuple) -> bool:
    """Returns whether a parameter multiplies activations: a router or a matrix of a projection."""
    leaf = leaf_of(path)
    return path[-1].key == ROUTER or (leaf is not None and leaf.role == MATRIX)


def is_matrix(path: tuple) -> bool:
    """Returns whether a weight of a parameter has two axes."""
    return is_linear_matrix(path) or path[-1].key in EMBEDDINGS


def has_muon(path: tuple) -> bool:
    """Returns whether Muon updates a parameter: a weight of a projection without its added term."""
    leaf = leaf_of(path)
    return leaf is not None and leaf.has_muon


def without_muon(tree: Any) -> Any:
    """Returns a tree like the params without the leaves that Muon updates."""
    if isinstance(tree, dict):
        names = [n for n in tree if not (n in LEAVES and LEAVES[n].has_muon)]
        return {name: without_muon(tree[name]) for name in names}
    return tuple(map(without_muon, tree)) if isinstance(tree, tuple) else tree


def update_scales(params: Any) -> Any:
    """Returns the factors of Muon's updates, see `Weight.update_scales`, of params or a section.

    Returns:
      A tree like the params that lacks what has no factor.
    """
    if isinstance(params, tuple):
        return tuple(map(update_scales, params))
    if form := stored_form(params):
        return form.update_scales(params)
    scales = {n: update_scales(p) for n, p in params.items() if isinstance(p, dict | tuple)}
    return {name: tree for name, tree in scales.items() if tree}


def scaled(updates: Any, scales: Any) -> Any:
    """Returns updates times the factors of `update_scales`."""
    if isinstance(updates, tuple):
        return tuple(map(scaled, updates, scales or ({},) * len(updates)))
    if isinstance(updates, dict):
        return {n: scaled(u, scales[n]) if n in scales else u for n, u in updates.items()}
    return updates * scales
