"""The product of inputs that have zeros with a dense weight (TEAL, arXiv 2408.14690, section 4).

A token that is decoded alone is bound by the bytes of the weights.  A zero input needs no row of
its weight, so a share of zeros saves this share of the bytes.
"""

import jax

from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.core.ops.nonzero_rows import row_loop as loop
from sparse_dataflow.core.ops.nonzero_rows import skips_rows


def nonzero_rows_matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Compute `x @ kernel`; one row on a CPU reads only the rows of its nonzero inputs.

    Elsewhere this is the dense product, which gains nothing from zeros: several tokens together
    need nearly every row of the weight, and GPUs and TPUs have no such kernel here.

    Args:
      x: float [tokens, in_features], with zeros at any places.
      kernel: [in_features, out_features] in x's dtype.

    Returns:
      [tokens, out_features] in x's dtype.
    """
    platform = dispatch.platform()
    skips = skips_rows(platform, len(x), kernel.shape[1])
    dispatch.log_choice("nonzero_rows_matmul", "loop" if skips else "dense", platform)
    return loop.matmul(x, kernel) if skips else x @ kernel
