"""Bytes that a decoding step reads, which bound its time.

Pure Python: importing this module loads no jax.
"""

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import MLP
from sparse_dataflow.core.ops.nonzero_rows import skips_rows
from sparse_dataflow.core.training.cost import DTYPE_BYTES, stored_fractions


def decoding_bytes(
    config: ModelConfig,
    batch: int,
    cached: int,
    activation_sparsity: float = 0.0,
    rows: bool = False,
) -> float:
    """Returns the bytes that a decoding step reads: each weight once, and the KV caches.

    Weights and caches have the compute dtype.  The output layer is read once; lookups count as 0.
    Caches have the key/value heads.  Rows choose different experts, as far as there are some.

    Args:
      batch: rows.
      cached: cached tokens of each row.
      activation_sparsity: share of the projections' inputs that are zeros on a CPU; a dense weight
        of one row is read without their rows.
      rows: whether blocks and masks of rows are decoded as rows, as on a CPU.
    """
    fractions = stored_fractions(config)
    weights: float = config.vocab_size * config.d_model
    for name in config.projections:
        fan_in, fan_out = config.projection_shape(name)
        spec, bias = config.linear(name), fan_out if name in config.biases else 0
        stored = fan_in * fan_out * fractions[name] + spec.term_numbers((fan_in, fan_out))
        row = spec.weight.input_row(spec, (fan_in, fan_out))
        if rows and (width := spec.weight.row_width(spec)):
            # A row has an index of two bytes.
            index = 2 / DTYPE_BYTES[config.compute_dtype] / width
            density = fractions[name] if spec.weight.stores_blocks else spec.density
            # Rows have a mask of their own: the fraction of blocks holds only where blocks are
            # decoded as rows.
            stored = fan_in * fan_out * density * (1 + index)
            stored += spec.term_numbers((fan_in, fan_out))
        elif row and skips_rows("cpu", batch, row):
            stored -= activation_sparsity * fan_in * row
        read = 1
        if config.experts and name in MLP:
            routed = batch * config.prototypes * config.top_k
            # Each expert that some row chose is read once for all rows.
            read = min(config.experts, routed) + config.shared_expert
        weights += config.num_layers * read * (stored + bias)
    weights += config.num_layers * config.d_model * config.experts
    # Keys and values of all cached tokens are read for each new token.
    caches = 2 * config.num_layers * batch * cached * config.kv_heads * config.head_width
    return (weights + caches) * DTYPE_BYTES[config.compute_dtype]
