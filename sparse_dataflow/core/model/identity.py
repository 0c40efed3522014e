"""Layers that begin as the identity: they add nothing to the residual stream, and learn at once."""

from collections.abc import Mapping

import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import ROW_PARALLEL
from sparse_dataflow.core.weights.kind import BIAS, TABLE

_OUTPUT_NORMS = ("norm1_out", "norm2_out")


def as_identity(model: ModelConfig, layer: Mapping[str, object]) -> dict[str, dict]:
    """Returns the parameters of a layer, or of its experts, with outputs of zero.

    Of the projections that write to the residual stream, what has output features is zero: a
    matrix, or the last of its factors.  Other factors stay, since a product of two zero factors has
    no gradient in either.

    Args:
      layer: parameters of one layer, see `gpt`; experts are stacked.
    """
    return {name: _silent(model, name, module) for name, module in layer.items()}


def _silent(model, name, module):
    if name in ("experts", "shared"):
        return as_identity(model, module)
    if name in ROW_PARALLEL:
        leaves = {n: model.linear(name).leaves.get(n, BIAS) for n in module}
        silent = {n for n, f in leaves.items() if f.output_dim is not None and f.role != TABLE}
        return {n: np.zeros_like(a) if n in silent else a for n, a in module.items()}
    if name in _OUTPUT_NORMS and "bias" in module:
        return {**module, "bias": np.zeros_like(module["bias"])}
    return module
