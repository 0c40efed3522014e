"""The product of inputs that have zeros: reads the rows of the weight that the others need."""

from sparse_dataflow.core.ops.platforms import SKIPPED_ROWS

SHORTEST_ROW = 256
"""Fewest outputs of a weight for which a CPU skips rows: at 40% zeros rows of 128 floats lose, and
rows of 256 gain little."""


def skips_rows(platform: str, tokens: int, out_features: int) -> bool:
    """Return whether the product of a dense weight skips rows.  Does not import jax.

    Args:
      platform: "cpu", "gpu" or "tpu".
      tokens: rows of the input.
      out_features: outputs of the weight.
    """
    return platform in SKIPPED_ROWS and tokens == 1 and out_features >= SHORTEST_ROW
