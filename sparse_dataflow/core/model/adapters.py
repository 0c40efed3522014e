"""Low-rank adapters of a projection, beside its weight.

An adapter is the low-rank term of a projection of a frozen model (LoRA, arXiv 2106.09685; see
`model.projection`): y = x W + alpha / rank * x A B.  Its factors A (`a_kernel`) and B (`b_kernel`,
zero at the start) are trained, and its gate is alpha / rank.  Everything but the factors is the
frozen base.  It needs no gradient, no optimizer state and no float32 master, so its matrices are
stored in the compute dtype, to which every product casts them anyway.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sparse_dataflow.core.config.layer_groups import join_groups, split_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.weights.dense import Dense, Quantised
from sparse_dataflow.core.weights.kind import (
    EMBEDDINGS,
    LAYOUT,
    MATRIX,
    leaf_of,
)
from sparse_dataflow.files.errors import UserError


def is_factor(model: ModelConfig, path: tuple) -> bool:
    """Returns whether an array at a `jax.tree_util` path is a factor of an adapter, which alone is
    trained."""
    leaf, (*_, projection, key) = leaf_of(model, path), path
    is_matrix = leaf is not None and leaf.role == MATRIX
    return is_matrix and key.key in model.linear(projection.key).term_leaves


def frozen(model: ModelConfig, params: dict, scale: float) -> dict:
    """Returns the frozen part of a parameter tree, in jax or numpy arrays as it is.

    Args:
      model: config with adapters.
      params: parameter tree, with adapters or without.
      scale: gate of every adapter.
    """
    dtype = jnp.dtype(model.compute_dtype)

    # The base is never updated, so a matrix needs no more bits than its products read.  Norms and
    # biases stay wide: they are small, and sums of them are not.
    def cast(path, leaf):
        fact, name = leaf_of(model, path), getattr(path[-1], "key", "")
        matrix = name in EMBEDDINGS or (fact is not None and fact.role == MATRIX)
        matrix = matrix and leaf.dtype != jnp.int8
        return leaf.astype(dtype) if matrix else leaf

    def with_gate(module, name):
        spec = model.linear(name)
        if not spec.term:
            return module
        base = {leaf: array for leaf, array in module.items() if leaf not in spec.term_leaves}
        weight = next(array for leaf, array in base.items() if leaf != LAYOUT)
        # The base keeps the gate of the low-rank term; the factors are trained.  A gate for each
        # layer of the stack.
        (gate,) = (leaf for leaf, about in spec.term_leaves.items() if about.role != MATRIX)
        return {**base, gate: jnp.full(len(weight), scale, jnp.float32)}

    def with_int8(module, name):
        spec = model.linear(name)
        if spec.frozen_dtype != "int8":
            return module
        if spec.weight is not Dense:
            raise UserError(
                f"{name}: frozen_dtype=int8 does not go with {spec.weight.words}; legal: "
                f"{Dense.words}."
            )
        return module | Quantised.arrays_of_dense(module)

    groups = [
        {name: with_int8(module, name) for name, module in group.items()}
        for group in split_groups(params["blocks"])
    ]
    params = {**params, "blocks": join_groups(groups)}
    base = jax.tree_util.tree_map_with_path(cast, params)
    groups = [
        {name: with_gate(module, name) for name, module in group.items()}
        for group in split_groups(base["blocks"])
    ]
    return {**base, "blocks": join_groups(groups)}


def dequantised(model: ModelConfig, params: dict) -> tuple[ModelConfig, dict]:
    """Returns a model of adapters, and all of its parameters, without int8 weights."""
    plain: dict[str, Any] = {"frozen_dtype": "compute"}
    specs = {n: dataclasses.replace(s, **plain) for n, s in dict(model.linears).items()}

    def wide(name, module):
        if model.linear(name).frozen_dtype != "int8":
            return module
        rest = {name: leaf for name, leaf in module.items() if name not in Quantised.leaves()}
        return rest | Quantised.arrays_of_float(module)

    groups = [
        {name: wide(name, module) for name, module in group.items()}
        for group in split_groups(params["blocks"])
    ]
    model = dataclasses.replace(model, linears=specs)
    return model, {**params, "blocks": join_groups(groups)}
