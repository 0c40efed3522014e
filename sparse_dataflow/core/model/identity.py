"""Layers that begin as the identity: they add nothing to the residual stream, and learn at once."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparse_dataflow.core.config.projections import ROW_PARALLEL
from sparse_dataflow.core.model.shard import output_dim
from sparse_dataflow.core.weights.kind import is_table

_OUTPUT_NORMS = ("norm1_out", "norm2_out")


def as_identity(layer: Mapping[str, object]) -> dict[str, Any]:
    """Returns the parameters of a layer, or of its experts, with outputs of zero.

    Of the projections that write to the residual stream, what has output features is zero: a
    matrix, or the last of its factors.  Other factors stay, since a product of two zero factors has
    no gradient in either.

    Args:
      layer: parameters of one layer, see `gpt`; experts are stacked.
    """
    return {name: _silent(name, module) for name, module in layer.items()}


def _silent(name, module):
    if name in ("experts", "shared"):
        return as_identity(module)
    if name in ROW_PARALLEL:
        silent = {n for n in module if output_dim(n) is not None and not is_table(n)}
        return {n: np.zeros_like(a) if n in silent else a for n, a in module.items()}
    if name in _OUTPUT_NORMS and "bias" in module:
        return {**module, "bias": np.zeros_like(module["bias"])}
    return module
