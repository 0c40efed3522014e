"""A model with every weight written out: what libraries without block-sparse layers read."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from sparse_dataflow.config.model import PROJECTIONS, SUPAR_HEAD, SUPAR_WIDTH, ModelConfig
from sparse_dataflow.kernels.hadamard.api import hadamard
from sparse_dataflow.models import gpt


def dense_form(model: ModelConfig, params: dict, tables: dict) -> tuple[ModelConfig, dict]:
    """The dense model of the same function, and its parameters in numpy, float32.

    Blocks that are not stored become zeros; a Hadamard transform goes into the weight that reads
    it, and a low-rank term is added; SuPar's factors of queries and of the logits go into the
    parameters before them.

    Args:
      model: any.
      params: see `gpt`.
      tables: concrete layout tables.
    """
    layouts = gpt.layouts_from_tables(model, tables)
    dense = dataclasses.replace(model, linears={}, parametrization="standard")
    layers = []
    for i, (own, _) in enumerate(gpt.layers(params["blocks"], tables)):
        layer = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), own)
        for name in PROJECTIONS:
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
        blocks["qkv"] = {name: _scaled_queries(model, leaf) for name, leaf in blocks["qkv"].items()}
        scale = SUPAR_WIDTH / model.d_model
        head = {"norm": {name: scale * np.asarray(leaf) for name, leaf in head["norm"].items()}}
    return dense, {**params, "blocks": blocks, "head": head}


def _scaled_queries(model, features):
    """Features of `qkv`, [..., head, (query, key, value), head_dim], its queries times the factor
    that `gpt.Block` gives them."""
    width = model.d_model // model.num_heads
    factors = np.ones((model.num_heads, 3, width), np.float32)
    factors[:, 0] = math.sqrt(SUPAR_HEAD / width)
    return features * factors.reshape(-1)
