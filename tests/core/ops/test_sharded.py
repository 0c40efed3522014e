"""Layouts split into shards, and kernels inside and outside `shard_map`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from simulated import targeted_tpu

from sparse_dataflow.core.layouts.layout import BlockLayout
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.core.ops.block_sparse_matmul import cut_tables as sharded
from sparse_dataflow.core.ops.block_sparse_matmul import grouped
from sparse_dataflow.core.ops.block_sparse_matmul import matmul_op as api
from sparse_dataflow.files.errors import UserError


@st.composite
def cuts(draw):
    """Draw (layout, shards, by columns); the layout is balanced on the sharded side at least."""
    shards, local_blocks, others = (draw(st.integers(1, 4)) for _ in range(3))
    by_columns = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    fan = draw(st.integers(1, others))
    mask = np.zeros((others, shards * local_blocks), bool)
    for column in range(shards * local_blocks):
        mask[rng.permutation(others)[:fan], column] = True
    return BlockLayout.from_mask(mask if by_columns else mask.T, 2), shards, by_columns


@given(cuts())
def test_shards_together_are_the_layout(example):
    layout, shards, by_columns = example
    cut = (sharded.cut_columns if by_columns else sharded.cut_rows)(layout, shards)
    masks = [shard.mask for shard in cut.shards]
    whole = np.concatenate(masks, axis=1 if by_columns else 0)
    np.testing.assert_array_equal(whole, layout.mask)
    values = np.random.default_rng(0).normal(size=(layout.nnz, 2, 2))
    values_by_shard = np.split(values[cut.order], shards)
    dense = [
        shard.to_dense(shard_values) for shard, shard_values in zip(cut.shards, values_by_shard)
    ]
    np.testing.assert_array_equal(
        np.concatenate(dense, axis=1 if by_columns else 0), layout.to_dense(values)
    )
    assert by_columns <= np.array_equal(cut.order, np.arange(layout.nnz))
    for number, shard in enumerate(cut.shards):
        tables = jax.tree.map(lambda table, number=number: table[number], cut.tables)
        assert BlockLayout.from_tables(tables, 2) == shard
        assert shard.nnz == layout.nnz // shards


def test_a_layout_that_cannot_be_split_is_refused():
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


def kernels(function, *operands):
    return str(jax.make_jaxpr(function)(*operands)).count("pallas_call[")


def test_arrays_that_may_be_sharded_use_kernels_only_inside_shard_map():
    layout = make_layout("cyclic", 256, 512, 64, 0.5)
    x, values = jnp.ones((16, 256)), jnp.ones((layout.nnz, 64, 64))
    product = lambda x, v: api.block_sparse_matmul(x, v, layout.tables())  # noqa: E731
    with targeted_tpu():
        assert kernels(product, x, values) == 1
    device = AbstractDevice("TPU v5 lite", 1, "tpu")
    auto = (AxisType.Auto,)
    mesh = AbstractMesh((2,), ("data",), axis_types=auto, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert "several devices" in dispatch.sharding_refusal()
        assert kernels(product, x, values) == 0
        specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
        mapped = jax.shard_map(product, mesh=mesh, check_vma=False, **specs)
        assert kernels(mapped, x, values) == 1


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize(
    ("shape", "divide"),
    [
        ((40, 120), sharded.cut_columns),
        ((40, 40), sharded.cut_rows),
        ((40, 160), sharded.cut_columns),
        ((160, 40), sharded.cut_rows),
    ],
)
def test_shards_of_monarch_hold_whole_groups(shape, divide, shards):
    """GPT-13B's projections in blocks of 128: every shard has the same structure."""
    layout = make_layout("monarch", *shape, 1, 1 / 8)
    groups = divide(layout, shards).tables.with_groups().groups
    assert groups.count == layout.groups.count // shards
    assert max(groups.in_parts, groups.out_parts) == layout.groups.count


@pytest.mark.parametrize("divide", [sharded.cut_columns, sharded.cut_rows])
@pytest.mark.parametrize("reads_residual", [True, False])
@pytest.mark.parametrize("shape", [(8, 8), (8, 24), (32, 8)])
def test_groups_of_a_shard_multiply_its_own_parts(shape, reads_residual, divide):
    """A group has runs of two blocks or more, so the second of four shards begins in a part whose
    number is not that of its first block; jax would clamp that of the last shard."""
    layout = make_layout("monarch", 2 * shape[0], 2 * shape[1], 2, 1 / 4, 0, reads_residual)
    cut, rng = divide(layout, 4), np.random.default_rng(0)
    tables = cut.tables.with_groups()
    for number, shard in enumerate(cut.shards):
        values = rng.normal(size=(shard.nnz, 2, 2)).astype(np.float32)
        x = rng.normal(size=(3, shard.in_features)).astype(np.float32)
        own = tables._replace(**{n: getattr(tables, n)[number] for n in tables._fields[:4]})
        y = grouped.block_sparse_matmul(jnp.asarray(x), jnp.asarray(values), own)
        np.testing.assert_allclose(y, x @ shard.to_dense(values), rtol=1e-4, atol=1e-5)
