"""A model with every weight written out: what libraries without block-sparse layers read."""

import dataclasses

import numpy as np

from sparse_dataflow.models import gpt
from sparse_dataflow.models.sizes import PROJECTIONS, ModelConfig


def dense_form(model: ModelConfig, params: dict, tables: dict) -> tuple[ModelConfig, dict]:
    """The dense model of the same function, and its parameters in numpy, float32.

    Blocks that are not stored become zeros; a low-rank term is added to the weight it belongs to.

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
    return dataclasses.replace(model, linears={}), {**params, "blocks": blocks}
