"""The block-sparse matmul of a layout of equal groups: one batch of dense products in XLA.

Each of y, dx and dW is one batched dot, and the index tables are not read.  On a GPU that is one
GEMM of the vendor's library, without temporaries where the inputs and outputs of a group are
contiguous.  Elsewhere XLA moves whole blocks, in the elementwise pass before or after the product
if there is one.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from sparse_dataflow.core.config.projections import PRECISIONS
from sparse_dataflow.core.layouts.layout import Groups, LayoutTables
from sparse_dataflow.core.ops import derivatives, dispatch, platforms
from sparse_dataflow.core.ops.dispatch import Shaped

Products = Callable[..., jax.Array]
"""(x [tokens, features], weight [groups, inputs, outputs], its groups, block=side) -> y."""


def block_sparse_matmul(
    x: jax.Array,
    values: jax.Array,
    tables: LayoutTables,
    *,
    products: Products | None = None,
) -> jax.Array:
    """Computes `x @ W` for x [tokens, in_features], values [nnz, block, block], in x's dtype.

    Args:
      x: the input.
      values: stored blocks, as `BlockLayout` orders them.
      tables: tables of the layout, with groups; only shapes are read, and in a shard the first
        group's part.
      products: multiplies each group; None for one batched dot.
    """
    groups, block = tables.groups, values.shape[-1]
    assert groups is not None
    weight = group_values(values, tables, groups)
    if dispatch.on(platforms.LIBRARY_GROUPS):
        # Else XLA joins it twice: once for the forward pass, within the product, and once more.
        weight = lax.optimization_barrier(weight)
    x = own_inputs(x, tables, groups, block)
    y = (products or dense_products)(x, weight, groups, block=block)
    return among_outputs(y, tables, groups, block)


def block_sparse_matmul_refusal(x: Shaped, values: Shaped, tables: LayoutTables) -> str:
    """Returns why a layout is no batch of dense products; empty if it is."""
    return "" if tables.groups else "the layout has no equal groups, or may change."


def operand_shapes(
    x: Shaped, values: Shaped, tables: LayoutTables, groups: Groups
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of the first two operands of `Products`."""
    features = groups.count * x.shape[-1] // groups.in_parts
    x = jax.ShapeDtypeStruct((x.shape[0], features), x.dtype)
    weight = jax.eval_shape(lambda values: group_values(values, tables, groups), values)
    return x, weight


def own_inputs(x: jax.Array, tables: LayoutTables, groups: Groups, block: int) -> jax.Array:
    """Returns the columns of x [tokens, features] that a shard's groups read."""
    if groups.in_parts == groups.count:
        return x
    parts = split(x, groups.in_parts, groups.in_run * block)
    # All devices run one program, so which parts are this shard's is read from its tables.  Output
    # block 0 is of the shard's first group.  Its first input block lies in the first run of the
    # group's part, so the number of this run is that of the part.
    first = tables.in_index[0, 0] // groups.in_run
    return lax.dynamic_slice_in_dim(parts, first, groups.count, axis=2).reshape(
        x.shape[0], groups.count * x.shape[1] // groups.in_parts
    )


def among_outputs(y: jax.Array, tables: LayoutTables, groups: Groups, block: int) -> jax.Array:
    """Returns the columns y of a shard's groups among all output columns, the others 0."""
    if groups.out_parts == groups.count:
        return y
    parts = split(y, groups.count, groups.out_run * block)
    # Found as in `own_inputs`: output parts of the first group begin with this run.
    first = tables.out_index[0, 0] // groups.out_run
    shape = (*parts.shape[:2], groups.out_parts, parts.shape[3])
    everywhere = lax.dynamic_update_slice_in_dim(jnp.zeros(shape, y.dtype), parts, first, axis=2)
    return everywhere.reshape(y.shape[0], len(tables.in_index) * block)


def dense_products(
    x: jax.Array,
    weight: jax.Array,
    groups: Groups,
    *,
    block: int,
    precision: str = PRECISIONS[0],
) -> jax.Array:
    """Multiplies the columns of each group.

    Arguments as in `Products`, and a precision as in `ModelConfig`.
    """
    x_by_group = split(x, groups.count, groups.in_run * block)
    y = _batched_products((groups.out_run * block, precision), x_by_group, weight)
    return y.reshape(x.shape[0], len(weight) * weight.shape[2])


def group_values(values: jax.Array, tables: LayoutTables, groups: Groups) -> jax.Array:
    """Returns the dense weight of each group, [groups, inputs, outputs], of [nnz, block, block].

    Inputs and outputs of a group ascend.
    """
    return groups.join(values, len(tables.out_index), len(tables.in_index))


def split(x, parts, run):
    """[tokens, features] -> [tokens, outer, parts, run] for runs of `run` features."""
    return x.reshape(x.shape[0], x.shape[1] // (parts * run), parts, run)


def _value(options, x, weight):
    """Multiplies each group: x [tokens, outer, groups, run], weight [groups, inputs, outputs].

    Returns [tokens, outer, groups, out_run], in x's dtype.
    """
    out_run, precision = options
    count, _, outputs = weight.shape
    value, _ = _types(precision)
    # [groups, outer, run, outputs]: the inputs of a group ascend as (outer, run), as in x.
    by_input = weight.reshape(count, x.shape[1], x.shape[3], outputs)
    y = _dot(x, by_input, ((1, 3), (1, 2)), (2, 0), (value, value))
    # A dot has its batch axis first, and the outputs of a group ascend as (outer, run).  With the
    # groups between these two, the columns are in the order of the layout.
    return y.reshape(count, x.shape[0], outputs // out_run, out_run).transpose(1, 2, 0, 3)


def _backward(options, saved, dy):
    (out_run, precision), (x, weight) = options, saved
    value, gradient = _types(precision)
    split = weight.reshape(*weight.shape[:2], dy.shape[1], out_run)
    dx = _dot(dy, split, ((1, 3), (2, 3)), (2, 0), (gradient, value))
    # [groups, tokens, inputs] -> [tokens, outer, groups, run], the axes of x.
    dx = dx.reshape(len(weight), x.shape[0], x.shape[1], x.shape[3]).transpose(1, 2, 0, 3)
    # Over tokens: [groups, outer, run, outer of outputs, run of outputs], which are the inputs and
    # the outputs of the weight in order.
    dweight = _dot(x, dy, ((0,), (0,)), (2, 2), (value, gradient))
    return dx, dweight.reshape(weight.shape).astype(weight.dtype)


_batched_products = derivatives.bilinear(_value, _backward)


def _types(precision):
    """Dtypes (of values, of gradients) that operands are quantised to, or (None, None)."""
    if precision == PRECISIONS[0]:
        return None, None
    from sparse_dataflow.core.ops import quantized

    return quantized.TYPES[precision]


def _dot(a, b, contracted, batch, dtypes):
    """Batched dot that accumulates in float32 or wider; the result has the dtype of `a`."""
    axes = contracted, ((batch[0],), (batch[1],))
    if None not in dtypes:
        from sparse_dataflow.core.ops import quantized

        return quantized.dot_general(a, b, axes, dtypes)
    # GPUs and TPUs accumulate in float32 and round once. A CPU accumulates in the result's dtype.
    narrow = dispatch.on(platforms.NARROW_SUMS)
    wide = jnp.promote_types(a.dtype, jnp.float32) if narrow else a.dtype
    return lax.dot_general(a, b, axes, preferred_element_type=wide).astype(a.dtype)
