"""The sparse MLP of two layouts of equal groups on a TPU, from their stored blocks."""

import jax

from sparse_dataflow.kernels.block_sparse_matmul import grouped
from sparse_dataflow.kernels.dispatch import Shaped
from sparse_dataflow.kernels.sparse_mlp import pallas_tpu_grouped as kernels
from sparse_dataflow.sparsity.layout import LayoutTables


def sparse_mlp(
    x: jax.Array,
    values_in: jax.Array,
    bias_in: jax.Array,
    values_out: jax.Array,
    tables_in: LayoutTables,
    tables_out: LayoutTables,
) -> jax.Array:
    """Compute gelu(x W_in + bias_in) W_out; arguments as in `api.sparse_mlp`, tables with groups.

    Raises:
      UserError: if `refusal` gives a reason.
    """
    groups_in, groups_out = tables_in.groups, tables_out.groups
    block = values_in.shape[-1]
    assert groups_in and groups_out
    weight_in = grouped.group_values(values_in, tables_in, groups_in)
    x = grouped.own_inputs(x, tables_in, groups_in, block)
    y = kernels.sparse_mlp(
        grouped.on_lanes(x, groups_in, weight_in, block),
        weight_in,
        bias_in,
        grouped.group_values(values_out, tables_out, groups_out),
        grouped.lane_groups(groups_in, weight_in, block),
        groups_out,
        block=block,
    )
    return grouped.among_outputs(y, tables_out, groups_out, block)


def refusal(
    x: Shaped,
    values_in: Shaped,
    values_out: Shaped,
    tables_in: LayoutTables,
    tables_out: LayoutTables,
) -> str:
    """Return why the target TPU cannot run these operands; empty if it can."""
    groups_in, groups_out = tables_in.groups, tables_out.groups
    if not groups_in or not groups_out:
        return "a layout has no equal groups, or may change."
    block = values_in.shape[-1]
    if values_out.shape[-1] != block:
        return f"the blocks have sides of {block} and {values_out.shape[-1]}; legal: one side."
    x, weight_in = grouped.operand_shapes(x, values_in, tables_in, groups_in)
    hidden = jax.ShapeDtypeStruct((len(x), len(tables_in.in_index) * block), x.dtype)
    weight_out = grouped.operand_shapes(hidden, values_out, tables_out, groups_out)[1]
    groups_in = grouped.lane_groups(groups_in, weight_in, block)
    return kernels.refusal(x, weight_in, weight_out, groups_in, groups_out, block=block)
