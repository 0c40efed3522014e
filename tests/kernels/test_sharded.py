"""The block-sparse matmul over a mesh: the same as on one device, and no weight travels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_devices import on_eight_devices
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from simulated import targeted_tpu

from sparse_dataflow.files.errors import UserError
from sparse_dataflow.kernels import dispatch
from sparse_dataflow.kernels.block_sparse_matmul import api, sharded
from sparse_dataflow.sparsity.layout import BlockLayout
from sparse_dataflow.sparsity.patterns import make_layout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "side", "kind"),
    [
        ("xla", "columns", "Auto"),
        ("xla", "rows", "Explicit"),
        ("pallas_tpu", "columns", "Auto"),
        pytest.param("reference", "rows", "Auto", marks=pytest.mark.nightly),
        pytest.param("pallas_tpu", "rows", "Auto", marks=pytest.mark.nightly),
    ],
)
def test_eight_devices_agree_with_one(implementation, side, kind):
    found = on_eight_devices("kernels/sharded_products.py", implementation, side, kind)
    assert found["error"] < 5e-6
    # One sum of partial results over the tensor axis, one of dW over the data axis.
    sums = {"all-gather": 0, "all-to-all": 0, "collective-permute": 0, "all-reduce": 2}
    assert found["collectives"] == sums
    assert found["programs"] == 1  # For two layouts.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "kind"),
    [
        ("products", "Auto"),
        pytest.param("pallas_tpu", "Auto", marks=pytest.mark.nightly),
        pytest.param("products", "Explicit", marks=pytest.mark.nightly),
    ],
)
def test_a_sharded_mlp_agrees_with_one_device(implementation, kind):
    found = on_eight_devices("kernels/sharded_products.py", implementation, "mlp", kind)
    assert found["error"] < 5e-6
    moved = {name: count for name, count in found["collectives"].items() if name != "all-reduce"}
    assert not any(moved.values())


@st.composite
def cuts(draw):
    """(layout, shards, by columns); some layouts with equal counts on one side only."""
    shards, own, others = (draw(st.integers(1, 4)) for _ in range(3))
    by_columns = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    fan = draw(st.integers(1, others))
    mask = np.zeros((others, shards * own), bool)
    for column in range(shards * own):
        mask[rng.permutation(others)[:fan], column] = True
    return BlockLayout.from_mask(mask if by_columns else mask.T, 2), shards, by_columns


@given(cuts())
def test_shards_together_are_the_layout(drawn):
    layout, shards, by_columns = drawn
    cut = (sharded.cut_columns if by_columns else sharded.cut_rows)(layout, shards)
    masks = [shard.mask for shard in cut.shards]
    whole = np.concatenate(masks, axis=1 if by_columns else 0)
    np.testing.assert_array_equal(whole, layout.mask)
    values = np.random.default_rng(0).normal(size=(layout.nnz, 2, 2))
    parts = np.split(values[cut.order], shards)
    dense = [shard.to_dense(part) for shard, part in zip(cut.shards, parts)]
    np.testing.assert_array_equal(
        np.concatenate(dense, axis=1 if by_columns else 0), layout.to_dense(values)
    )
    assert by_columns <= np.array_equal(cut.order, np.arange(layout.nnz))
    for number, shard in enumerate(cut.shards):
        own = jax.tree.map(lambda table, number=number: table[number], cut.tables)
        assert BlockLayout.from_tables(own, 2) == shard
        assert shard.nnz == layout.nnz // shards


def test_a_layout_that_cannot_be_cut_is_refused_in_words():
    layout = make_layout("cyclic", 48, 96, 8, 0.5)
    with pytest.raises(UserError, match=r"12 output blocks.*5 shards; legal: 1, 2, 3, 4, 6, 12"):
        sharded.cut_columns(layout, 5)
    with pytest.raises(UserError, match=r"6 input blocks.*4 shards; legal: 1, 2, 3, 6"):
        sharded.cut_rows(layout, 4)
    mask = np.ones((4, 4), bool)
    mask[0, 0] = False
    with pytest.raises(UserError, match=r"would store from 7 to 8 blocks; legal: .*output"):
        sharded.cut_columns(BlockLayout.from_mask(mask, 8), 2)
    with pytest.raises(UserError, match="Fan 1 is too small; legal: at least 2"):
        sharded.cut_columns(BlockLayout.from_mask(np.ones((4, 4), bool), 8), 2, fan=1)


def test_operands_that_do_not_fit_the_mesh_are_refused():
    layout = make_layout("cyclic", 32, 64, 8, 0.5)
    tables = sharded.cut_columns(layout, 2).tables
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x, values = jnp.ones((4, 32)), jnp.ones((layout.nnz, 8, 8))
    with pytest.raises(UserError, match=r"tables have shape \(2, 4, 2\); legal: \[1, lines, fan\]"):
        sharded.column_parallel(x, values, tables, mesh, "model")
    with pytest.raises(UserError, match=r"axis 'tensor'.*legal: different ones of data, model"):
        sharded.row_parallel(x, values, tables, mesh, "tensor")
    with pytest.raises(UserError, match=r"axis 'data'.*do not fit"):
        sharded.row_parallel(x, values, tables, mesh, "data", data_axes=("data",))
    whole = sharded.cut_columns(layout, 1).tables
    with pytest.raises(UserError, match=r"x has shape \(32,\); legal: \[a multiple of 1"):
        sharded.column_parallel(x[0], values, whole, mesh, "model")


def kernels(function, *operands):
    return str(jax.make_jaxpr(function)(*operands)).count("pallas_call[")


def two_tpus(kind):
    device = AbstractDevice("TPU v5 lite", 1, "tpu")
    return AbstractMesh((2,), ("model",), axis_types=(kind,), abstract_device=device)


def test_arrays_that_may_be_sharded_take_no_kernel_but_inside_shard_map():
    layout = make_layout("cyclic", 256, 512, 64, 0.5)
    x, values = jnp.ones((16, 256)), jnp.ones((layout.nnz, 64, 64))
    whole = lambda x, v: api.block_sparse_matmul(x, v, layout.tables())  # noqa: E731
    with targeted_tpu():
        assert kernels(whole, x, values) == 1
    auto = two_tpus(AxisType.Auto)
    with jax.sharding.use_abstract_mesh(auto):
        assert "inside shard_map" in dispatch.partitioned()
        assert kernels(whole, x, values) == 0
        tables = sharded.cut_columns(layout, 2).tables
        parallel = lambda x, v: sharded.column_parallel(x, v, tables, auto, "model")  # noqa: E731
        assert kernels(parallel, x, values) == 1
