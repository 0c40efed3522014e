"""How many tokens have their logits in memory at once, for the cross-entropy and the planner."""

from typing import Any

import numpy as np

CPU_TOKENS = 512
"""Tokens of a chunk on a CPU, and the fewest elsewhere.  The planner counts those of a GPU or TPU
for a CPU too: at most half a GiB more."""

MOST_TOKENS = 4096
LOGITS_BYTES = 2**29
"""Most bytes of a chunk's float32 logits on a GPU or TPU.  Each chunk reads and writes the gradient
of the whole embedding, and pads the embedding, so few long chunks are faster: on an H100 chunks of
512 tokens took 39 ms of a 256 ms step of 6.7B, 60% of it in these passes."""


def chunk_tokens(vocabulary: Any) -> Any:
    """Returns the tokens of a chunk on a GPU or TPU, a power of two.

    Args:
      vocabulary: rows of the output layer on a device, a number or an array of numbers.
    """
    fitting = 2 ** np.floor(np.log2(LOGITS_BYTES / (4 * np.asarray(vocabulary))))
    return np.clip(fitting, CPU_TOKENS, MOST_TOKENS).astype(int)
