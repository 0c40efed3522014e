"""Paths of modules and of leaves, as names; arrays without values."""

import jax
from jax.tree_util import GetAttrKey


def without_values(tree: object) -> bool:
    """Returns whether an array of a tree has no values: it is abstract, or traced by `jit`."""
    kinds = jax.ShapeDtypeStruct | jax.core.Tracer
    return any(isinstance(leaf, kinds) for leaf in jax.tree.leaves(tree))


def dotted(path: tuple) -> str:
    """Returns a path of nnx as one string, "layers.0.mlp"."""
    return ".".join(map(str, path))


def keys_of(path: tuple) -> tuple:
    """Returns the keys of a path of jax, without those inside an nnx variable."""
    return tuple(
        key
        for key in path
        if not (isinstance(key, GetAttrKey) and key.name in ("value", "raw_value"))
    )


def names_of(path: tuple) -> tuple[str, ...]:
    """Returns the names in a path of jax, without those inside an nnx variable."""
    return tuple(
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))
        for key in keys_of(path)
    )
