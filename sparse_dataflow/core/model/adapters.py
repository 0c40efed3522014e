"""What is trained beside frozen weights: low-rank adapters, prompt vectors, a side network.

An adapter is the low-rank term of a projection of a frozen model (LoRA, arXiv 2106.09685; see
`model.projection`): y = x W + alpha / rank * x A B.  Its factors A (`a_kernel`) and B (`b_kernel`,
zero at the start) are trained, and its gate is alpha / rank.  Everything but the factors is the
frozen base.  It needs no gradient, no optimizer state and no float32 master, so its matrices are
stored in the compute dtype, to which every product casts them anyway.

Prompt vectors (CPM-2, arXiv 2106.10715; arXiv 2104.08691) stand in front of each row of tokens, at
its first positions, in place of embeddings.  A row has them as ids that follow the vocabulary
(`with_prompt`), so positions, masks and meshes treat them as tokens.  No loss counts them: their
targets have no weight, and `executors.whole` returns no states of them.

`model.side` explains side networks.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.layer_groups import join_groups, split_groups
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.weights.dense import Dense, Quantised
from sparse_dataflow.core.weights.kind import (
    EMBEDDINGS,
    LAYOUT,
    MATRIX,
    SIDE,
    leaf_of,
)
from sparse_dataflow.files.errors import UserError

PROMPT = "prompt"
"""Name of the vectors in the section "embed"."""


def with_prompt(model: ModelConfig, batch: Batch) -> Batch:
    """Returns a batch of tokens with the model's prompt vectors in front of each row."""
    count = model.prompt_vectors

    def extended(name, rows):
        ids = model.vocab_size + np.arange(count) if name == "tokens" else np.zeros(count)
        front = jnp.broadcast_to(ids.astype(rows.dtype), (len(rows), count))
        return jnp.concatenate([front, rows], axis=1)

    if not count:
        return batch
    return batch.with_rows({name: extended(name, rows) for name, rows in batch.rows.items()})


def is_trained(model: ModelConfig, path: tuple) -> bool:
    """Returns whether an array at a `jax.tree_util` path is trained beside frozen weights: a factor
    of an adapter, the prompt vectors, or an array of a side network."""
    if path[-1].key == PROMPT or getattr(path[-2], "key", "") == SIDE:
        return True
    leaf, (*_, projection, key) = leaf_of(model, path), path
    is_matrix = leaf is not None and leaf.role == MATRIX
    return is_matrix and key.key in model.linear(projection.key).term_leaves


def frozen(model: ModelConfig, params: dict, scale: float) -> dict:
    """Returns the frozen part of a parameter tree, in jax or numpy arrays as it is.

    Args:
      model: config with adapters.
      params: parameter tree, with adapters or without.
      scale: gate of every adapter; see `TrainingConfig.adapter_scale`.
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
        {name: with_int8(module, name) for name, module in group.items() if name != SIDE}
        for group in split_groups(params["blocks"])
    ]
    params = {**params, "blocks": join_groups(groups)}
    for section, trained in (("embed", PROMPT), ("head", SIDE)):
        if section in params:  # A section may stand alone.
            leaves = params[section].items()
            params[section] = {name: leaf for name, leaf in leaves if name != trained}
    base = jax.tree_util.tree_map_with_path(cast, params)
    groups = [
        {name: with_gate(module, name) for name, module in group.items()}
        for group in split_groups(base["blocks"])
    ]
    return {**base, "blocks": join_groups(groups)}


def dequantised(model: ModelConfig, params: dict) -> tuple[ModelConfig, dict]:
    """Returns a model of adapters, and all of its parameters, without int8 weights."""
    specs = {
        n: dataclasses.replace(s, frozen_dtype="compute") for n, s in dict(model.linears).items()
    }

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
