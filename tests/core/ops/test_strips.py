"""Strips of blocks, as square blocks, are the same weight."""

import jax
import numpy as np
import pytest
from marks import some

from sparse_dataflow.core.executors import cuts
from sparse_dataflow.core.layouts.layout import BlockLayout, LayoutTables, stack_layouts
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.ops.block_sparse_matmul import dense_matmul as reference
from sparse_dataflow.core.ops.block_sparse_matmul import xla_static
from sparse_dataflow.files.errors import UserError


@pytest.mark.parametrize("name", ["mlp_in", "mlp_out"])
@pytest.mark.parametrize(
    "pattern", some(["monarch", "shuffle", "random", "butterfly"], "monarch", "random")
)
@pytest.mark.parametrize("traced", [False, True])
def test_strips_of_a_shard_are_the_strips_of_its_dense_weight(name, pattern, traced):
    """On the two shards of a tensor axis, with padded lines where a shard stores unequal ones."""
    shape = (64, 128) if name == "mlp_in" else (128, 64)
    layout = make_layout(pattern, *shape, 8, 0.25, 1, name == "mlp_in")
    rng = np.random.default_rng(0)
    values = rng.normal(size=(layout.nnz, 8, 8)).astype(np.float32)
    cut = cuts.cut(name, stack_layouts([layout]), 2, changing=False)
    values = values if cut.order is None else values[cut.order[0]]
    for shard, shard_values in enumerate(np.split(values, 2)):
        arrays = (table[0, shard] for table in cut.layout.arrays)
        tables = LayoutTables(*arrays, cut.layout.groups)
        dense = np.asarray(reference.to_dense(shard_values, tables))
        strip = shard_values[:, 4:6] if name == "mlp_in" else shard_values[:, :, 4:6]
        if traced:
            squares, squared = jax.jit(xla_static.in_squares)(strip, tables)
        else:
            squares, squared = xla_static.in_squares(strip, tables)
        by_block = dense.reshape(dense.shape[0] // 8, 8, -1, 8)
        expected = by_block[:, 4:6] if name == "mlp_in" else by_block[..., 4:6]
        sides = (dense.shape[0] // 4, -1) if name == "mlp_in" else (-1, dense.shape[1] // 4)
        np.testing.assert_array_equal(reference.to_dense(squares, squared), expected.reshape(sides))
        # Also by the tables that gradients read; they raise an error if they disagree.
        arrays = LayoutTables(*map(np.asarray, squared.arrays))
        groups = BlockLayout.from_tables(arrays, 2).groups
        if squared.groups is not None:
            assert groups == squared.groups
    assert (cut.layout.groups is not None) == (pattern in ("monarch", "shuffle"))


def test_rows_of_a_layout_with_unequal_fan_in_are_refused():
    layout = BlockLayout.from_mask(np.array([[True, True], [True, False]]), 4)
    with pytest.raises(UserError, match="reads equally many input blocks"):
        xla_static.in_squares(np.zeros((3, 2, 4), np.float32), layout.tables())
