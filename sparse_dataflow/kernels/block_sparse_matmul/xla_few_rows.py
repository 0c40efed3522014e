"""The block-sparse matmul for few rows of x, as in decoding: bound by the bytes of `values`.

Every stored block is read once, in place, and multiplied by its slice of x.  The partial products
take rows / block of the blocks' bytes and are then summed along the table's lines.  `xla` gathers
the blocks by table line first, which triples the bytes.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.sparsity.layout import LayoutTables

FEW_ROWS = 32
"""Most rows of x for which this form is the fastest on a CPU (measured for 2048 x 8192, blocks of
64, density 1/8)."""


def product(x: jax.Array, values: jax.Array, tables: LayoutTables) -> jax.Array:
    """Compute `x @ W` for x [rows, in_features], values [nnz, block, block], in x's dtype."""
    rows, block = len(x), values.shape[-1]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    slots = tables.in_slot
    reads = jnp.zeros(len(values) + 1, jnp.int32).at[slots].set(tables.in_index)[:-1]
    gathered = x.reshape(rows, x.shape[1] // block, block)[:, reads]
    if rows == 1:
        # XLA fuses this into one pass over the blocks; a batched dot starts one product per block.
        products = jnp.sum(values.astype(wide) * gathered[0].astype(wide)[:, :, None], axis=1)[
            :, None
        ]
    else:
        products = lax.dot_general(
            gathered, values, (((2,), (1,)), ((1,), (0,))), preferred_element_type=wide
        )
    if slots.size != len(values):  # Padding (slot -1) reads the appended zeros.
        products = jnp.concatenate([products, jnp.zeros_like(products[:1])])
    y = jnp.sum(products[slots], axis=1)
    return y.swapaxes(0, 1).reshape(rows, len(slots) * block).astype(x.dtype)
