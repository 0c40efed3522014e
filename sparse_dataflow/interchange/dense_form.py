"""A model with every weight written out: what libraries without block-sparse layers read."""

import dataclasses
import math

import numpy as np

from sparse_dataflow.models import gpt
from sparse_dataflow.models.sizes import PROJECTIONS, SUPAR_HEAD, SUPAR_WIDTH, ModelConfig


def dense_form(model: ModelConfig, params: dict, tables: dict) -> tuple[ModelConfig, dict]:
    """The dense model of the same function, and its parameters in numpy, float32.

    Blocks that are not stored become zeros; a low-rank term is added to the weight it belongs to;
    SuPar's factors of queries and of the logits go into the parameters before them.

    Args:
      model: any.
      params: see `gpt`.
      tables: concrete layout tables.
    """
    layouts = gpt.layouts_of(model, tables)
    blocks = dict(params["blocks"])
    for name in PROJECTIONS:
        module = {leaf: np.asarray(values, np.float32) for leaf, values in blocks[name].items()}
        if name in layouts:
            stored = zip(layouts[name], module["values"])
            kernel = np.stack([layout.to_dense(values) for layout, values in stored])
        else:
            kernel = module["kernel"]
        if model.linear(name).rank:
            term = module["a_kernel"] @ module["b_kernel"]
            kernel = kernel + module["gate"][:, None, None] * term
        blocks[name] = {"kernel": kernel, "bias": module["bias"]}
    head = params["head"]
    if model.supar:
        blocks["qkv"] = {name: _scaled_queries(model, leaf) for name, leaf in blocks["qkv"].items()}
        scale = SUPAR_WIDTH / model.d_model
        head = {"norm": {name: scale * np.asarray(leaf) for name, leaf in head["norm"].items()}}
    dense = dataclasses.replace(model, linears={}, parametrization="standard")
    return dense, {**params, "blocks": blocks, "head": head}


def _scaled_queries(model, features):
    """Features of `qkv`, [..., head, (query, key, value), head_dim], its queries times the factor
    that `gpt.Block` gives them."""
    width = model.d_model // model.num_heads
    factors = np.ones((model.num_heads, 3, width), np.float32)
    factors[:, 0] = math.sqrt(SUPAR_HEAD / width)
    return features * factors.reshape(-1)
