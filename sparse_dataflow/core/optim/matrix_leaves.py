"""Which parameters are matrices, and which of them Muon updates, by what a weight's class says."""

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import PROJECTIONS
from sparse_dataflow.core.model.partition import ArrayTree
from sparse_dataflow.core.weights.kind import (
    EMBEDDINGS,
    MATRIX,
    ROLE_AXES,
    is_free_matrix,
    leaf_of,
)

VOCABULARY = ("tokens", "output", "output_bias")
"""Leaves with a row for each token."""


def weight_axes(model: ModelConfig, path: tuple) -> int:
    """Returns the number of axes of one weight of a parameter, after those of its stack.

    Args:
      path: of `jax.tree_util`, in the params or in a section of them.
    """
    if leaf := leaf_of(model, path):
        return ROLE_AXES[leaf.role]
    return 2 if is_matrix(model, path) else 1


def is_linear_matrix(model: ModelConfig, path: tuple) -> bool:
    """Returns whether a parameter multiplies activations: a matrix of a projection, or
    `is_free_matrix`."""
    leaf = leaf_of(model, path)
    return is_free_matrix(path) or (leaf is not None and leaf.role == MATRIX)


def is_matrix(model: ModelConfig, path: tuple) -> bool:
    """Returns whether a weight of a parameter has two axes."""
    return is_linear_matrix(model, path) or path[-1].key in EMBEDDINGS


def has_muon(model: ModelConfig, path: tuple) -> bool:
    """Returns whether Muon updates a parameter: a weight of a projection without its added term."""
    leaf = leaf_of(model, path)
    return leaf is not None and leaf.has_muon


def without_muon(model: ModelConfig, tree: object, module: str = "") -> ArrayTree:
    """Returns a tree like the params without the leaves that Muon updates."""
    if isinstance(tree, tuple):
        return tuple(without_muon(model, each, module) for each in tree)
    if not isinstance(tree, dict):
        return tree
    leaves = model.linear(module).leaves if module in PROJECTIONS else {}
    dropped = {name for name, leaf in leaves.items() if leaf.has_muon}
    return {name: without_muon(model, tree[name], name) for name in tree if name not in dropped}


def update_scales(model: ModelConfig, params: ArrayTree, module: str = "") -> ArrayTree:
    """Returns the factors of Muon's updates, see `Weight.update_scales`, of params or a section.

    Returns:
      A tree like the params that lacks what has no factor.
    """
    if isinstance(params, tuple):
        return tuple(update_scales(model, each) for each in params)
    if module in PROJECTIONS:
        return model.linear(module).weight.update_scales(params)
    inner = {n: p for n, p in params.items() if isinstance(p, dict | tuple)}
    scales = {name: update_scales(model, tree, name) for name, tree in inner.items()}
    return {name: tree for name, tree in scales.items() if tree}


def scaled(updates: ArrayTree, scales: ArrayTree) -> ArrayTree:
    """Returns updates times the factors of `update_scales`."""
    if isinstance(updates, tuple):
        return tuple(map(scaled, updates, scales or ({},) * len(updates)))
    if isinstance(updates, dict):
        return {n: scaled(u, scales[n]) if n in scales else u for n, u in updates.items()}
    return updates * scales
