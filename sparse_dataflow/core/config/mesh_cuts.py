"""What the mesh axes "tensor" and "feature" can cut; loads no jax."""

from typing import Any

import numpy as np

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import ROW_PARALLEL


def key_value_copies(config: ModelConfig, tensor: Any) -> Any:
    """Returns how many of `tensor` chips compute the same key/value head; also of arrays of counts.

    Where there are more chips than key/value heads, the weights of separate projections `k` and `v`
    are replicated over them, and each chip computes the head that its queries read.
    """
    if config.fused_qkv:
        return 1
    return np.maximum(1, np.asarray(tensor) // config.kv_heads)


def run_length(model: ModelConfig) -> int:
    """Returns the features in a run of the residual stream that the axis cuts into equal parts.

    It is the side of the stored blocks, so that every block is cut alike; d_model without any.
    """
    sides = [model.linear(name).block for name in model.sparse_projections]
    return max(sides, default=model.d_model)


def obstacle(model: ModelConfig, tensor: int, feature: int) -> str:
    """Returns why the axis "feature" cannot have a size; empty if it can.

    Args:
      model: the model.
      tensor: size of the axis "tensor", which must be legal.
      feature: size of the axis.
    """
    if feature == 1:
        return ""
    if model.experts:
        return "cannot cut experts"
    if model.low_rank_projections:
        return "cannot cut weights of sparsity.pattern=low_rank"
    if key_value_copies(model, tensor) > 1:
        return f"needs a tensor axis of at most the {model.kv_heads} key/value heads"
    sparse, run = model.sparse_projections, run_length(model)
    if len({model.linear(name).block for name in sparse}) > 1:
        return "needs blocks of the same side in all block-sparse projections"
    counts = {f"{model.kv_heads} key/value heads": (model.kv_heads, tensor * feature)}
    for name in model.projections:
        if name not in ROW_PARALLEL:
            features = model.projection_shape(name)[1]
            counts[f"the {features} output features of {name}"] = features, tensor * feature
    counts[f"the {run} features of a block" if sparse else f"d_model {run}"] = run, feature
    words = next((words for words, (count, by) in counts.items() if count % by), "")
    if words:
        return f"does not divide {words}"
    # A transform mixes consecutive features, which must be on one device.
    mixed = max(model.linear(name).hadamard for name in model.projections)
    if mixed and run // feature % mixed:
        return f"leaves {run // feature} consecutive features to sparsity.hadamard={mixed}"
    return ""
