"""The TPU kernels beyond the shared suite: fusion, tiles, tile tables."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_products import assert_all_close, draw, exact, fused
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from marks import examples, some
from simulated import simulated_tpu, targeted_tpu

from sparse_dataflow.chips.tpu.matmul import api as pallas_tpu
from sparse_dataflow.chips.tpu.matmul import tuning
from sparse_dataflow.chips.tpu.matmul.tables import tile_tables
from sparse_dataflow.core.layouts.layout import BlockLayout, pad_tables
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.ops.block_sparse_matmul import matmul_op as api
from sparse_dataflow.files.errors import UserError

TOKENS = 37


@pytest.mark.parametrize(
    ("block", "dtype"), some([(128, "float32"), (64, "bfloat16"), (32, "float32")], 64)
)
def test_any_layout_runs_fused_in_one_program(block, dtype):
    """Irregular layouts with empty lines, widths and tokens that are not a multiple of a tile."""
    in_blocks, out_blocks, stored = 3, 5, 8
    programs = []

    @jax.jit
    def program(*operands):
        programs.append(1)
        return fused(pallas_tpu, *operands)

    @settings(max_examples=examples(6))
    @given(places=st.permutations(range(in_blocks * out_blocks)), seed=st.integers(0, 99))
    def check(places, seed):
        mask = np.zeros(in_blocks * out_blocks, bool)
        mask[places[:stored]] = True
        layout = BlockLayout.from_mask(mask.reshape(in_blocks, out_blocks), block)
        operands = draw(layout, TOKENS, jnp.dtype(dtype), seed)
        with simulated_tpu():
            actual = program(*operands, pad_tables(layout.tables(), in_blocks, out_blocks))
        assert_all_close(actual, exact(layout, *operands), jnp.dtype(dtype))

    check()
    assert len(programs) == 1


SMALL_TILES = tuning.TuningConfig(
    forward=tuning.ProductTiles(32, 2, 16, lines=2, stream=tuning.StreamTiles(1, ahead=3)),
    input_gradient=tuning.ProductTiles(64, 1, 64, lines=1, stream=tuning.StreamTiles(2, ahead=2)),
    weight_gradient=tuning.GradientTiles(tokens=128, lines=2, entries=2),
    vmem_bytes=16 << 20,
    cores=2,
)


@pytest.mark.parametrize("fuse", some([True, False], True))
def test_many_small_tiles_agree_with_few(fuse):
    """Several tiles in every loop, over two cores; the GELU's derivative inside or before dW."""
    tiles = dataclasses.replace(SMALL_TILES, fuse_derivative=fuse)
    layout = BlockLayout.from_mask(np.random.default_rng(1).random((4, 3)) < 0.7, 128)
    operands = draw(layout, 200, np.float32)
    tables = layout.tables()
    with simulated_tpu("TPU v5", 2):
        actual = jax.jit(lambda *o: fused(pallas_tpu, *o, tables, tuning=tiles))(*operands)
    assert_all_close(actual, exact(layout, *operands), np.float32)


@settings(max_examples=examples(100))
@given(
    mask=hnp.arrays(bool, hnp.array_shapes(min_dims=2, max_dims=2, max_side=9)),
    ratio=st.sampled_from([1, 2, 4]),
    traced=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_tile_tables_have_every_stored_block_once(mask, ratio, traced, seed):
    """In each line the tiles with stored blocks come first, whatever the order of the entries."""
    mask[0, 0] = True
    shuffled = np.random.default_rng(seed).permutation
    layout = BlockLayout.from_mask(mask, 32)
    build = jax.jit(tile_tables, static_argnums=(2, 3)) if traced else tile_tables
    tables = layout.tables()
    sides = [
        (tables.in_index, tables.in_slot, layout.slots),
        (tables.out_index, tables.out_slot, layout.slots.T),
    ]
    for index, slot, slots in sides:
        order = shuffled(index.shape[1])
        tiles = build(index[:, order], slot[:, order], len(slots), ratio)
        count, tile, stored = map(np.asarray, tiles)
        used = (stored >= 0).any((2, 3))
        np.testing.assert_array_equal(used, np.arange(used.shape[1]) < count[:, None])
        restored = np.full([-(-side // ratio) * ratio for side in slots.shape], -1)
        for line, entry, other, line_block in np.argwhere(stored >= 0):
            assert entry < count[line]
            place = tile[line, entry] * ratio + other, line * ratio + line_block
            assert restored[place] == -1
            restored[place] = stored[line, entry, other, line_block]
        inside = tuple(map(slice, slots.shape))
        np.testing.assert_array_equal(restored[inside], slots)
        assert (restored >= 0).sum() == layout.nnz
        if not traced:
            assert tile.shape[1] == count.max()


CHIPS = [("TPU v4", 2), ("TPU v5 lite", 1), ("TPU v5", 2), ("TPU v6 lite", 1)]
PROJECTIONS = [(5120, 15360), (5120, 5120), (5120, 20480), (20480, 5120)]


@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize("density", [1 / 2, 1 / 4, 1 / 8, 1 / 16])
@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip[0])
def test_default_tiles_of_13b_fit_every_chip(chip, density, activated):
    for shape in PROJECTIONS:
        for block in (64, 128):
            # 40 blocks of 128 have no balanced layout at 1/16; the next density is 3/40.
            legal_density = 3 / 40 if (block, density) == (128, 1 / 16) else density
            layout = make_layout("pixelfly", *shape, block, legal_density)
            x = jax.ShapeDtypeStruct((2048, shape[0]), jnp.bfloat16)
            values = jax.ShapeDtypeStruct((layout.nnz, block, block), jnp.bfloat16)
            tables = layout.tables()
            with targeted_tpu(*chip):
                assert (
                    pallas_tpu.block_sparse_matmul_refusal(x, values, tables, activated=activated)
                    == ""
                )
                config = pallas_tpu.default_tuning(x, values, tables, activated=activated)
                assert config.vmem_bytes == tuning.device().vmem_capacity_bytes
            assert config.cores == chip[1]
            for product in (config.forward, config.input_gradient):
                assert product.tokens >= 256  # Tokens per weight read.
                assert product.buffers == 2 or chip[0] == "TPU v4"


@pytest.mark.parametrize("tokens", [1024, 2048, 3000, 600])
def test_all_cores_get_equally_many_token_tiles(tokens):
    layout = make_layout("cyclic", 512, 512, 128, 0.5)
    x, values, *_ = (
        jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in draw(layout, tokens, "f4")
    )
    with targeted_tpu("TPU v5", 2):
        config = pallas_tpu.default_tuning(x, values, layout.tables())
    for tiles in (config.forward, config.input_gradient):
        assert -(-tokens // tiles.tokens) % 2 == 0 and tiles.tokens >= 512


def kernels_chosen(layout, name=None, chip=CHIPS[2]):
    """Return the number of Pallas kernels in a forward and backward pass through the API."""
    x, values, dy, *_ = draw(layout, 8, np.float32)

    def gradients(x, values, dy):
        y, pullback = jax.vjp(
            lambda x, v: api.block_sparse_matmul(x, v, layout.tables(), name), x, values
        )
        return y, pullback(dy)

    return str(jax.make_jaxpr(gradients)(x, values, dy)).count("pallas_call[")


def test_the_kernels_are_chosen_where_they_run():
    layout, other = make_layout("cyclic", 256, 256, 64, 0.5), make_layout("cyclic", 64, 64, 16, 0.5)
    with targeted_tpu():
        assert kernels_chosen(layout) == 3
        assert kernels_chosen(layout, "xla") == 0
        assert kernels_chosen(other) == 0
    assert kernels_chosen(layout) == 0


def refused(layout, dtype="float32"):
    x, values, *_ = draw(layout, 8, jnp.dtype(dtype))
    with pytest.raises(UserError) as refusal, targeted_tpu():
        api.block_sparse_matmul(x, values, layout.tables(), "pallas_tpu")
    return str(refusal.value)


def test_illegal_operands_are_refused():
    legal = make_layout("cyclic", 256, 256, 64, 0.5)
    assert "legal: 32, 64, 128, 256" in refused(make_layout("cyclic", 64, 64, 16, 0.5))
    assert "legal: one of bfloat16, float32" in refused(legal, "float16")
    with pytest.raises(UserError, match=r"runs on tpu, and this is cpu\. Legal here"):
        kernels_chosen(legal, "pallas_tpu")


def test_a_product_that_exceeds_vmem_is_refused():
    layout = make_layout("cyclic", 128 * 4096, 128, 128, 1.0)
    x = jax.ShapeDtypeStruct((8, layout.in_features), jnp.float32)
    values = jax.ShapeDtypeStruct((layout.nnz, 128, 128), jnp.float32)
    with targeted_tpu("TPU v4", 1):
        assert "fits VMEM" in pallas_tpu.block_sparse_matmul_refusal(x, values, layout.tables())
