"""A loop over the nonzero inputs of one row, for a CPU: bound by the bytes of the rows it reads.

Rows are read in place.  Gathering them first writes and reads each of them again, which is slower
than the dense product.
"""

import jax
import jax.numpy as jnp
from jax import lax

ROWS = 8
"""Rows that a round of the loop adds to the outputs, which it reads and writes once.  16 are as
fast for long rows and slower for short ones."""


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Compute `x @ kernel` for x [1, in], in x's dtype; sums are float32 (float64 for float64)."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    room = -(-x.shape[1] // ROWS) * ROWS
    count = jnp.count_nonzero(x[0])
    # The last round may need fewer rows; a needed row counts zero times in their place.
    [index] = jnp.nonzero(x[0], size=room, fill_value=jnp.argmax(x[0] != 0))
    scale = jnp.where(jnp.arange(room) < count, x[0, index], 0).astype(wide)

    def add_rows(turn, y):
        rows = lax.dynamic_slice(index, [turn * ROWS], [ROWS])
        scales = lax.dynamic_slice(scale, [turn * ROWS], [ROWS])
        for i in range(ROWS):
            y += scales[i] * lax.dynamic_index_in_dim(kernel, rows[i], keepdims=False).astype(wide)
        return y

    # The number of rounds is data, so the loop ends with the last nonzero input.
    rounds = (count + ROWS - 1) // ROWS
    y = lax.fori_loop(0, rounds, add_rows, jnp.zeros(kernel.shape[1], wide))
    return y[None].astype(x.dtype)
