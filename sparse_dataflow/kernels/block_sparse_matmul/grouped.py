"""The block-sparse matmul of a layout of equal groups: one batch of dense products in XLA.

Each of y, dx and dW is one batched dot, and the index tables are not read.  On a GPU that is one
GEMM of the vendor's library, without temporaries where the inputs and outputs of a group are
contiguous.  Elsewhere XLA moves whole blocks, in the elementwise pass before or after the product
if there is one.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.kernels import dispatch
from sparse_dataflow.sparsity.layout import Groups, LayoutTables

jax.tree_util.register_static(Groups)


def block_sparse_matmul(
    x: jax.Array, values: jax.Array, tables: LayoutTables, groups: Groups
) -> jax.Array:
    """Computes `x @ W` for x [tokens, in_features], values [nnz, block, block], in x's dtype.

    Args:
      x: the input.
      values: stored blocks, as `BlockLayout` orders them.
      tables: tables of the layout; only shapes are read, and in a shard the first group's part.
      groups: structure of the layout.
    """
    weight = group_values(values, tables, groups)
    x_parts = _split(x, groups.in_parts, groups.in_run * values.shape[-1])
    out_features = len(tables.in_index) * values.shape[-1]
    # In a shard, one side has parts of the other shards too.
    if groups.in_parts > groups.count:
        first = tables.in_index[0, 0] // groups.in_run
        x_parts = lax.dynamic_slice_in_dim(x_parts, first, groups.count, axis=2)
    y_parts = _batched_products(groups.out_run * values.shape[-1], x_parts, weight)
    if groups.out_parts > groups.count:
        first = tables.out_index[0, 0] // groups.out_run
        shape = (*y_parts.shape[:2], groups.out_parts, y_parts.shape[3])
        y_parts = lax.dynamic_update_slice_in_dim(
            jnp.zeros(shape, y_parts.dtype), y_parts, first, axis=2
        )
    return y_parts.reshape(len(x), out_features)


def group_values(values: jax.Array, tables: LayoutTables, groups: Groups) -> jax.Array:
    """Returns the dense weight of each group, [groups, inputs, outputs], of [nnz, block, block].

    Inputs and outputs of a group ascend.
    """
    by_block = values.reshape(*_stored_axes(values, tables, groups))
    outer, count, run, inputs, block, _ = by_block.shape
    return by_block.transpose(1, 3, 4, 0, 2, 5).reshape(count, inputs * block, outer * run * block)


def ungroup_values(weight: jax.Array, block: int, groups: Groups) -> jax.Array:
    """Returns the stored blocks [nnz, block, block] of `group_values`; its inverse."""
    count, inputs, outputs = weight.shape
    run = groups.out_run
    grid = (count, inputs // block, block, outputs // (run * block), run, block)
    return weight.reshape(grid).transpose(3, 0, 4, 1, 2, 5).reshape(-1, block, block)


def _stored_axes(values, tables, groups):
    """Axes of values: outer output runs, groups, blocks of a run, input blocks, and the block."""
    inputs = len(tables.out_index) // groups.in_parts
    outputs = len(tables.in_index) // groups.out_parts
    return outputs // groups.out_run, groups.count, groups.out_run, inputs, *values.shape[1:]


def _split(x, parts, run):
    """[tokens, features] -> [tokens, outer, parts, run] for runs of `run` features."""
    return x.reshape(len(x), x.shape[1] // (parts * run), parts, run)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _batched_products(out_run, x, weight):
    """Multiplies each group: x [tokens, outer, groups, run], weight [groups, inputs, outputs].

    Returns [tokens, outer, groups, out_run], in x's dtype.
    """
    count, _, outputs = weight.shape
    y = _dot(x, weight.reshape(count, x.shape[1], x.shape[3], outputs), ((1, 3), (1, 2)), (2, 0))
    return y.reshape(count, len(x), outputs // out_run, out_run).transpose(1, 2, 0, 3)


def _forward(out_run, x, weight):
    return _batched_products(out_run, x, weight), (x, weight)


def _backward(out_run, saved, dy):
    x, weight = saved
    split = weight.reshape(*weight.shape[:2], dy.shape[1], out_run)
    dx = _dot(dy, split, ((1, 3), (2, 3)), (2, 0))
    dx = dx.reshape(len(weight), len(x), x.shape[1], x.shape[3]).transpose(1, 2, 0, 3)
    dweight = _dot(x, dy, ((0,), (0,)), (2, 2))
    return dx, dweight.reshape(weight.shape).astype(weight.dtype)


_batched_products.defvjp(_forward, _backward)


def _dot(a, b, contracted, batch):
    """Batched dot that accumulates in float32 or wider; the result has the dtype of `a`."""
    # GPUs and TPUs accumulate in float32 and round once. A CPU accumulates in the result's dtype.
    wide = jnp.promote_types(a.dtype, jnp.float32) if dispatch.platform() == "cpu" else a.dtype
    axes = contracted, ((batch[0],), (batch[1],))
    return lax.dot_general(a, b, axes, preferred_element_type=wide).astype(a.dtype)
