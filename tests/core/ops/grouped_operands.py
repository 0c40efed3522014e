"""Layouts of equal groups, and their stored blocks as one dense weight per group."""

import numpy as np

from sparse_dataflow.core.layouts.layout import BlockLayout


def layout_of(groups, in_blocks, out_blocks, block):
    """Return the layout of groups."""
    in_group = np.arange(in_blocks) // groups.in_run % groups.count
    out_group = np.arange(out_blocks) // groups.out_run % groups.count
    return BlockLayout.from_mask(in_group[:, None] == out_group, block)


def weight_of(layout, values, count):
    """Return stored blocks [nnz, block, block] as [count, K, N]."""
    inputs, outputs = layout.in_blocks // count, layout.out_blocks // count
    # Slots ascend by output block; the first input of an output names its group.
    first_input = layout.rows.reshape(-1, inputs)[:, 0].repeat(inputs)
    order = np.argsort(first_input, kind="stable")
    blocks = values[order].reshape(count, outputs, inputs, layout.block, layout.block)
    return blocks.transpose(0, 2, 3, 1, 4).reshape(
        count, inputs * layout.block, outputs * layout.block
    )
