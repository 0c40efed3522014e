"""Low-rank adapters of a frozen model (LoRA, arXiv 2106.09685): y = x W + alpha / rank * x A B.

An adapter is the low-rank term of a projection (see `models.linear`): its factors A (`a_kernel`)
and B (`b_kernel`, zero at the start) are trained, and its gate is alpha / rank.  Everything but the
factors is the frozen base.  It needs no gradient, no optimizer state and no float32 master, so its
matrices are stored in the compute dtype, to which every product casts them anyway.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from sparse_dataflow.config.layer_groups import join_groups, split_groups
from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.files.errors import UserError

FACTORS = ("a_kernel", "b_kernel")
"""Leaves of a projection that are trained."""

MATRICES = ("kernel", "values", "tokens", "positions", "output")
"""Leaves that a frozen base stores in the compute dtype; its vectors stay float32."""


def with_adapters(model: ModelConfig, rank: int) -> ModelConfig:
    """Returns the model with an adapter on every projection; the model itself for rank 0.

    Raises:
      UserError: a projection is narrower than the rank, or has a low-rank term already.
    """
    if not rank:
        return model
    model.refuse_experts(f"training.adapter_rank={rank}", "0")
    narrowest = min(min(model.projection_shape(name)) for name in model.projections)
    if rank > narrowest:
        raise UserError(
            f"training.adapter_rank={rank} is above {narrowest}, the features of the narrowest "
            f"projection; legal: 1 to {narrowest}."
        )
    with_term = [name for name in model.projections if model.linear(name).rank]
    if with_term:
        raise UserError(
            f"training.adapter_rank={rank} on weights whose {', '.join(with_term)} have a low-rank "
            "term already; legal: weights without one, such as the dense form that "
            "experiments.export writes."
        )
    specs = {n: dataclasses.replace(model.linear(n), rank=rank) for n in model.projections}
    return dataclasses.replace(model, linears=specs)


def without_adapters(model: ModelConfig) -> ModelConfig:
    """Returns the base of `with_adapters`."""
    specs = {name: dataclasses.replace(spec, rank=0) for name, spec in dict(model.linears).items()}
    return dataclasses.replace(model, linears=specs)


def factors(params: dict) -> dict:
    """Returns the trained part of a parameter tree: the factors of its adapters."""
    groups = [
        {
            name: {leaf: module[leaf] for leaf in FACTORS}
            for name, module in group.items()
            if FACTORS[0] in module
        }
        for group in split_groups(params["blocks"])
    ]
    return {"blocks": join_groups(groups)}


def frozen(model: ModelConfig, params: dict, scale: float) -> dict:
    """Returns the frozen part of a parameter tree, in jax or numpy arrays as it is.

    Args:
      model: config with adapters.
      params: parameter tree, with adapters or without.
      scale: gate of every adapter.
    """
    dtype = jnp.dtype(model.compute_dtype)

    def cast(path, leaf):
        return leaf.astype(dtype) if path[-1].key in MATRICES else leaf

    def with_gate(module, name):
        if not model.linear(name).rank:
            return module
        weight = next(iter(jax.tree.leaves(module)))
        base = {leaf: array for leaf, array in module.items() if leaf not in FACTORS}
        return {**base, "gate": jnp.full(len(weight), scale, jnp.float32)}

    base = jax.tree_util.tree_map_with_path(cast, params)
    groups = [
        {name: with_gate(module, name) for name, module in group.items()}
        for group in split_groups(base["blocks"])
    ]
    return {**base, "blocks": join_groups(groups)}


def merged(params: Any, base: Any) -> Any:
    """Returns one tree with the leaves of both; `params` where `base` is empty."""
    if not base:
        return params
    if isinstance(base, tuple):
        return tuple(map(merged, params, base))
    both = {name: merged(params[name], tree) for name, tree in base.items() if name in params}
    return {**base, **params, **both}
