"""Conversion of a block-sparse model to an equivalent dense one, for other libraries."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.config.model import SUPAR_HEAD, SUPAR_WIDTH, ModelConfig
from sparse_dataflow.kernels.hadamard.api import hadamard
from sparse_dataflow.models import gpt


def dense_form(model: ModelConfig, params: dict, tables: dict) -> tuple[ModelConfig, dict]:
    """Converts a model to a dense one that computes the same function.

    Blocks that are not stored become zeros. Hadamard transforms and low-rank terms are folded into
    the dense weights. SuPar's query and logit factors are folded into the parameters before them.

    Args:
      model: config of the model.
      params: its parameter tree; see `gpt`.
      tables: its concrete layout tables.

    Returns:
      (dense config, dense parameter tree in numpy float32).
    """
    layouts = gpt.layouts_from_tables(model, tables)
    dense = dataclasses.replace(model, linears={}, parametrization="standard")
    layers = []
    for i, (layer_params, _) in enumerate(gpt.layers(params["blocks"], tables)):
        layer = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), layer_params)
        for name in model.projections:
            module = layer[name]
            if name in layouts:
                kernel = layouts[name][i].to_dense(module["values"])
            else:
                kernel = module["kernel"]
            spec = model.linear(name)
            if spec.hadamard:
                kernel = np.asarray(hadamard(jnp.asarray(kernel.T), spec.hadamard)).T
            if spec.rank:
                kernel = kernel + module["gate"] * (module["a_kernel"] @ module["b_kernel"])
            layer[name] = {"kernel": kernel, "bias": module["bias"]}
        layers.append(layer)
    blocks = gpt.stacked_layers(dense, layers)
    head = params["head"]
    if model.supar:
        blocks["qkv"] = {name: _scale_queries(model, leaf) for name, leaf in blocks["qkv"].items()}
        scale = SUPAR_WIDTH / model.d_model
        head = {"norm": {name: scale * np.asarray(leaf) for name, leaf in head["norm"].items()}}
    return dense, {**params, "blocks": blocks, "head": head}


def _scale_queries(model, features):
    """Multiplies the queries of `qkv` features [..., head, (query, key, value), head_dim] by
    SuPar's factor, which `gpt.Block` applies to a sparse model."""
    head_dim = model.d_model // model.num_heads
    factors = np.ones((model.num_heads, 3, head_dim), np.float32)
    factors[:, 0] = math.sqrt(SUPAR_HEAD / head_dim)
    return features * factors.reshape(-1)
