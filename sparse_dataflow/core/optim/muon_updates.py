"""Muon on devices: the matrices of every parameter, and the updates of stacked layers."""

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.model.partition import ArrayTree
from sparse_dataflow.core.model.stacks import layout_of_leaf, layouts_by_place
from sparse_dataflow.core.optim import muon


def matrix_updates(
    momentum: jax.Array,
    gradient: jax.Array,
    number: jax.Array,
    mesh: Mesh | AbstractMesh | None,
    matrices: muon.Matrices,
) -> jax.Array:
    """Returns `muon.update` of stacked layers.

    One layer follows another, so that temporaries are those of one layer, unless stages shard the
    layers.  Blocks or groups that are themselves sharded, because no axis divides their number, are
    gathered once; the products would gather them in every Newton-Schulz step.
    """

    stacked = momentum.ndim > 3

    def whole(tree):
        if mesh is None or not stacked:
            return tree
        # Matrices are whole; the axes that count them stay sharded as they are.
        batch = (P.UNCONSTRAINED,) * (jax.tree.leaves(tree)[0].ndim - 2)
        return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, P(*batch, None, None)))

    def update(stacks):
        layer, layer_gradient = whole(jax.tree.map(matrices.join, stacks))
        return matrices.split(whole(muon.update(layer, layer_gradient, number)))

    if mesh is not None and mesh.shape["stage"] > 1:
        return update((momentum, gradient))
    return jax.lax.map(update, (momentum, gradient))


def matrices_like(model: ModelConfig, params: object, rest: object = ()) -> ArrayTree:
    """Returns the matrices of each array of a tree like the params; see `muon.matrices_of`.

    Args:
      rest: has the layouts.
    """
    layouts = layouts_by_place(rest)

    def matrices(path, leaf):
        return muon.matrices_of(leaf.shape, layout_of_leaf(model, path, layouts))

    return jax.tree_util.tree_map_with_path(matrices, params)
