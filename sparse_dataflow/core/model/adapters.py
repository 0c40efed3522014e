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
import numpy as np

from sparse_dataflow.core.config.adapted_model import with_adapters as with_adapters
from sparse_dataflow.core.config.adapted_model import without_adapters as without_adapters
from sparse_dataflow.core.config.layer_groups import join_groups, split_groups
from sparse_dataflow.core.config.model import ModelConfig

FACTORS = ("a_kernel", "b_kernel")
"""Leaves of a projection that are trained."""

SCALE = "kernel_scale"
"""Leaf with the scales of an int8 `kernel`."""

MATRICES = ("kernel", "values", "tokens", "positions", "output")
"""Leaves that a frozen base stores in the compute dtype; its vectors stay float32."""


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
        matrix = path[-1].key in MATRICES and leaf.dtype != jnp.int8
        return leaf.astype(dtype) if matrix else leaf

    def with_gate(module, name):
        if not model.linear(name).rank:
            return module
        weight = next(iter(jax.tree.leaves(module)))
        base = {leaf: array for leaf, array in module.items() if leaf not in FACTORS}
        return {**base, "gate": jnp.full(len(weight), scale, jnp.float32)}

    def with_int8(module, name):
        if model.linear(name).frozen_dtype != "int8" or "kernel" not in module:
            return module
        kernel, kernel_scale = quantised(module["kernel"])
        return {**module, "kernel": kernel, SCALE: kernel_scale}

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


def quantised(kernel: Any) -> tuple[Any, Any]:
    """Returns matrices as int8 with a scale for each output, as qwix has them.

    The largest magnitude of an output is 127.5 scales.

    Args:
      kernel: float [..., in, out], in jax or numpy, as the results are.

    Returns:
      (int8 [..., in, out], float32 [..., out]); their product is within half a scale of `kernel`.
    """
    arrays: Any = jnp if isinstance(kernel, jax.Array) else np
    wide = kernel.astype(arrays.float32)
    largest = arrays.max(arrays.abs(wide), axis=-2)
    scale = arrays.where(largest > 0, largest / 127.5, 1).astype(arrays.float32)
    numbers = arrays.clip(arrays.round(wide / scale[..., None, :]), -127, 127)
    return numbers.astype(arrays.int8), scale


def dequantised(model: ModelConfig, params: dict) -> tuple[ModelConfig, dict]:
    """Returns a model of adapters, and all of its parameters, without int8 weights."""
    plain: dict[str, Any] = {"frozen_dtype": "compute"}
    specs = {n: dataclasses.replace(s, **plain) for n, s in dict(model.linears).items()}

    def wide(module):
        if SCALE not in module:
            return module
        rest = {name: leaf for name, leaf in module.items() if name != SCALE}
        return {**rest, "kernel": module["kernel"] * module[SCALE][..., None, :]}

    groups = [
        {name: wide(module) for name, module in group.items()}
        for group in split_groups(params["blocks"])
    ]
    model = dataclasses.replace(model, linears=specs)
    return model, {**params, "blocks": join_groups(groups)}


def merged(params: Any, base: Any) -> Any:
    """Returns one tree with the leaves of both; `params` where `base` is empty."""
    if not base:
        return params
    if isinstance(base, tuple):
        return tuple(map(merged, params, base))
    both = {name: merged(params[name], tree) for name, tree in base.items() if name in params}
    return {**base, **params, **both}
