"""Host memory of pruning a language model from a directory into a directory."""

import math

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.pruning.columns import LARGE, MOST_THREADS

PROGRAMS = 0.6e9
"""Bytes of Python, jax and its compiled programs."""
LAYER = 16
"""Bytes of a parameter of a layer: float32 of the dense and the pruned one, both twice as one of
them is on the device, which is host memory of a CPU."""
SQUARES, PRODUCTS = 9, 10
"""Float64 arrays [in, in] and [in, out] of a projection while it is pruned; of few inputs each
thread of `columns` has one more."""
STREAMS = 2
"""Residual streams in float32, and inputs of attn_out: of the dense and of the pruned model."""


def host_bytes(model: ModelConfig, tokens: int) -> dict[str, float]:
    """Returns the bytes of each part of the peak, which do not depend on the number of layers.

    Args:
      model: dense.
      tokens: of all batches.
    """
    shapes = [model.projection_shape(name) for name in model.projections]
    squares = {ins: SQUARES + (MOST_THREADS if ins < LARGE else 0) for ins, _ in shapes}
    projection = max(8.0 * (squares[ins] * ins + PRODUCTS * outs) * ins for ins, outs in shapes)
    return {
        "programs": PROGRAMS,
        "layer": float(LAYER * sum(math.prod(shape) for shape in shapes)),
        "projection": projection,
        "streams": 4.0 * STREAMS * tokens * (model.d_model + model.num_heads * model.head_width),
    }
