"""The block-sparse matmul for few rows of x, as in decoding: bound by the bytes of `values`.

Stored blocks are read in place.  They are sorted by output block, so those of an output block are
one matrix, unless its line of the table is padded.  `xla` gathers the blocks by table line first,
which triples the bytes.  Of a layout of equal groups no table is read.

Kernels for CPUs and GPUs start at tiles of more rows, so both take this form.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from sparse_dataflow.core.layouts.layout import LayoutTables
from sparse_dataflow.core.ops import dispatch, platforms

FEW_ROWS = 32
"""Most rows of x for which this form is the fastest on a CPU (measured for 1024 x 4096, blocks of
64, density 1/8)."""


def product(x: jax.Array, values: jax.Array, tables: LayoutTables) -> jax.Array:
    """Compute `x @ W` for x [rows, in_features], values [nnz, block, block], in x's dtype."""
    rows, block, groups = x.shape[0], values.shape[-1], tables.groups
    if groups and groups.count == groups.in_parts == groups.out_parts:
        return _grouped_product(x, values, groups)
    slots, index = tables.in_slot, tables.in_index
    if padded := slots.size != len(values):
        # One matrix per stored block; its partial products are summed below.
        # Input block of each stored block.  Padding, slot -1, writes to the extra last place, which
        # is cut off.
        index = jnp.zeros(len(values) + 1, jnp.int32).at[slots].set(index)[:-1, None]
    lines, inputs = len(index), index.shape[1] * block
    gathered = x.reshape(rows, x.shape[1] // block, block)[:, index.reshape(-1)]
    y = _products(gathered.reshape(rows, lines, inputs), values.reshape(lines, inputs, block))
    if padded:  # Padding (slot -1) reads the appended zeros.
        y = jnp.sum(jnp.pad(y, [(0, 0), (0, 1), (0, 0)])[:, slots], axis=2)
    return y.reshape(rows, len(slots) * block).astype(x.dtype)


def _grouped_product(x, values, groups):
    """Compute `product` of a layout of whole groups; moves of x are part of its kernels."""
    rows, block, run = x.shape[0], values.shape[-1], groups.in_run * values.shape[-1]
    # [rows, groups, outer, run]: the inputs of a group side by side, ascending.
    by_group = x.reshape(rows, -1, groups.count, run).swapaxes(1, 2)
    inputs = by_group.shape[2] * run
    # Lines are ordered (outer, group, run).
    weight = values.reshape(-1, groups.count, groups.out_run, inputs, block)
    lines = (rows, weight.shape[0], groups.count, groups.out_run)
    by_line = by_group.reshape(rows, 1, groups.count, 1, inputs)
    by_line = jnp.broadcast_to(by_line, (*lines, inputs)).reshape(rows, -1, inputs)
    y = _products(by_line, weight.reshape(by_line.shape[1], inputs, block))
    return y.reshape(rows, -1).astype(x.dtype)


def _products(x, weight):
    """Multiply each line: x [rows, lines, inputs], weight [lines, inputs, block], in float32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if x.shape[0] == 1:
        # XLA fuses this into one loop; a batched dot starts one product per line.
        products = x.astype(wide)[..., None] * weight.astype(wide)
        if dispatch.on(platforms.REORDERED_LOOPS) and isinstance(products, jax.core.Tracer):
            # In a loop over tokens XLA else turns some products, and writes them for that.
            products = with_layout_constraint(products, Layout((0, 1, 2, 3)))
        return jnp.sum(products, axis=2)
    axes = ((2,), (1,)), ((1,), (0,))
    return lax.dot_general(x, weight, axes, preferred_element_type=wide).swapaxes(0, 1)
