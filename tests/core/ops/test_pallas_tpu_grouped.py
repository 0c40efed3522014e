"""The grouped TPU kernels, interpreted, against dense products in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_products import assert_all_close, draw
from grouped_operands import layout_of, weight_of
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples, some
from simulated import simulated_tpu, targeted_tpu

from sparse_dataflow.chips.tpu.grouped_matmul import api as kernels
from sparse_dataflow.chips.tpu.grouped_matmul import tuning as tuning_grouped
from sparse_dataflow.chips.tpu.matmul import tuning
from sparse_dataflow.core.layouts.layout import Groups
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.ops.block_sparse_matmul.matmul_op import block_sparse_matmul


def drawn(groups, in_blocks, out_blocks, block, tokens, dtype, seed=0):
    """Return operands (x, weight, dy) and exact (y, dx, dW) in float64."""
    layout = layout_of(groups, in_blocks, out_blocks, block)
    x, values, dy, _ = draw(layout, tokens, jnp.dtype(dtype), seed)
    wide_x, stored, wide_dy = (np.asarray(array, np.float64) for array in (x, values, dy))
    dense = layout.to_dense(stored)
    weight, dweight = (
        weight_of(layout, array, groups.count)
        for array in (values, layout.from_dense(wide_x.T @ wide_dy))
    )
    return (x, weight, dy), (wide_x @ dense, wide_dy @ dense.T, dweight)


def products(operands, groups, **options):
    """Return (y, dx, dW) of the kernels."""
    x, weight, dy = operands
    product = lambda x, weight: kernels.products(x, weight, groups, **options)  # noqa: E731
    y, pullback = jax.vjp(product, x, weight)
    return y, *pullback(dy)


@st.composite
def shapes(draw):
    """Draw (groups, in_blocks, out_blocks, block) with runs of one block, some, and all."""
    block = draw(st.sampled_from([64, 128]))
    count, lanes = draw(st.integers(1, 3)), 128 // block

    def side():
        run = draw(st.integers(1, 2)) * lanes
        return run, run * draw(st.integers(1, 3)) * count

    (in_run, in_blocks), (out_run, out_blocks) = side(), side()
    return Groups(count, in_run, out_run), in_blocks, out_blocks, block


@settings(max_examples=examples(5))
@given(shape=shapes(), tokens=st.integers(1, 300), dtype=st.sampled_from(["bfloat16", "float32"]))
def test_any_equal_groups_agree_with_the_dense_product(shape, tokens, dtype):
    operands, expected = drawn(*shape, tokens, dtype)
    with simulated_tpu():
        actual = jax.jit(lambda *o: products(o, shape[0], block=shape[-1]))(*operands)
    assert_all_close(actual, expected, jnp.dtype(dtype))


SMALL_TILES = tuning_grouped.GroupedTuning(
    forward=tuning_grouped.GroupedProductTiles(tokens=64, features=128, rows=48),
    input_gradient=tuning_grouped.GroupedProductTiles(tokens=32, features=128, rows=16),
    weight_gradient=tuning_grouped.GroupedGradientTiles(tokens=128, features=128, chunk=128),
    vmem_bytes=16 << 20,
    cores=2,
)


@pytest.mark.parametrize("copies", some(["on_wait", "eager"], "eager"))
def test_many_small_tiles_over_two_cores(copies):
    """Feature tiles that cut runs, and tokens that are no multiple of a tile."""
    groups = Groups(3, in_run=2, out_run=2)
    operands, expected = drawn(groups, 6, 12, 128, 200, "float32")
    with simulated_tpu("TPU v5", 2, copies):
        actual = jax.jit(lambda *o: products(o, groups, block=128, tuning=SMALL_TILES))(*operands)
    assert_all_close(actual, expected, np.float32)


CHIPS = [("TPU v4", 2), ("TPU v5 lite", 1), ("TPU v5", 2), ("TPU v6 lite", 1)]
PROJECTIONS = [(5120, 15360), (5120, 5120), (5120, 20480), (20480, 5120)]


def structs(groups, in_features, out_features, tokens=2048, dtype=jnp.bfloat16):
    count = groups.count
    shapes = (tokens, in_features), (count, in_features // count, out_features // count)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip[0])
def test_default_tiles_of_13b_read_each_operand_once_where_vmem_is_large(chip):
    for projection in PROJECTIONS:
        for count in (4, 5, 8, 20):
            groups = Groups(count, in_run=1, out_run=projection[1] // 128 // count)
            operands = structs(groups, *projection)
            with targeted_tpu(*chip):
                assert kernels.groups_refusal(*operands, groups, block=128) == ""
                tiles = kernels.default_tuning(*operands, groups, block=128)
                assert tiles.vmem_bytes == tuning.device().vmem_capacity_bytes
            assert min(tiles.forward.tokens, tiles.input_gradient.tokens) >= 256
            if count % 2 == 0 and count >= 8 and chip[0] != "TPU v4":
                _, inputs, outputs = operands[1].shape
                assert tiles.forward.features == outputs
                assert tiles.input_gradient.features == inputs
                assert tiles.weight_gradient.features == max(inputs, outputs)


@given(tokens=st.integers(1, 9000))
def test_few_rows_are_computed_twice(tokens):
    groups = Groups(8, in_run=1, out_run=5)
    with targeted_tpu():
        tiles = kernels.default_tuning(*structs(groups, 5120, 5120, tokens), groups, block=128)
    for side, multiple in ((tiles.forward, 16), (tiles.weight_gradient, 128)):
        assert side.tokens % multiple == 0
        number = -(-tokens // side.tokens)
        assert number * (side.tokens - multiple) < tokens or tokens < multiple


def test_illegal_operands_are_refused():
    def reason(dtype=jnp.float32, block=128, weight=(2, 128, 128)):
        groups = Groups(2, in_run=1, out_run=1)
        operands = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((8, 256), weight))
        with targeted_tpu():
            return kernels.groups_refusal(*operands, groups, block=block)

    assert reason() == ""
    assert "in runs of 64; legal: whole runs of a multiple of 128" in reason(block=64)
    assert "legal: one of bfloat16, float32" in reason(jnp.float16)
    assert "legal: [tokens, 256] and 2 groups" in reason(weight=(1, 128, 256))


def test_a_group_too_wide_for_vmem_is_refused():
    groups = Groups(1, 1, 1)
    with targeted_tpu():
        assert "legal: more groups" in kernels.groups_refusal(
            *structs(groups, 2**20, 2**20), groups, block=128
        )


def test_runs_narrower_than_the_lanes_are_moved_together():
    layout = make_layout("monarch", 512, 1024, 64, 1 / 2)
    assert layout.groups.in_run * 64 < 128
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(48, 512)), jnp.float32)
    values = jnp.asarray(rng.normal(size=(layout.nnz, 64, 64)), jnp.float32)

    def gradients(name):
        squares = lambda x, v: jnp.sum(  # noqa: E731
            block_sparse_matmul(x, v, layout.tables(), name) ** 2
        )
        return jax.jit(jax.value_and_grad(squares, argnums=(0, 1)))(x, values)

    with simulated_tpu():
        actual, expected = gradients("pallas_tpu_grouped"), gradients("reference")
    for got, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-3)
