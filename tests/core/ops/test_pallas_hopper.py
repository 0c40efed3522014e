"""The Hopper kernels beyond the shared suite: fusion, accumulation, tiles, races."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_products import assert_all_close, draw, exact, exact_gelu, fused
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from marks import examples, some
from simulated_hopper import simulated_hopper, targeted_gpu

from sparse_dataflow.chips.hopper import api as pallas_hopper
from sparse_dataflow.chips.hopper import tuning
from sparse_dataflow.chips.hopper.plan import count_stored
from sparse_dataflow.chips.hopper.tables import merge_lines, split_float32
from sparse_dataflow.core.layouts.layout import BlockLayout, pad_tables
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.core.ops import dispatch
from sparse_dataflow.core.ops.block_sparse_matmul import matmul_op as api
from sparse_dataflow.core.ops.block_sparse_matmul.xla_few_rows import FEW_ROWS
from sparse_dataflow.files.errors import UserError

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < pallas_hopper.NEEDED_JAX,
    reason=f"Mosaic GPU kernels need jax >= 0.11, not {jax.__version__}",
)


IRREGULAR = BlockLayout.from_mask(
    np.array([[1, 0, 1, 0], [1, 0, 1, 1], [0, 0, 1, 0]], bool), 64
)  # An empty column, and columns of one, two and three blocks.


def small_tiles(block, cluster=1, splits=1, lines=1):
    """Return tiles so small that every loop has several steps."""
    side = min(block, 128)
    product = tuning.ProductTiles(
        rows=64,
        columns=side * lines,
        depth=min(block, 64),
        stages=2,
        cluster=cluster,
        group=1,
        lines=lines,
    )
    return tuning.TuningConfig(
        forward=product,
        input_gradient=dataclasses.replace(product, stages=3, group=2),
        weight_gradient=tuning.GradientTiles(
            side=side,
            width=2 if block < 128 and lines < 4 else 1,
            depth=64,
            stages=2,
            splits=splits,
            lines=lines,
        ),
        multiprocessors=2,
    )


@pytest.mark.slow
@needs_mosaic
def test_any_layout_runs_fused_in_one_program():
    """Irregular layouts with empty lines, and tokens that are not a multiple of a tile."""
    in_blocks, out_blocks, stored, block = 3, 5, 8, 64
    programs = []

    @jax.jit
    def program(*operands):
        programs.append(1)
        return fused(pallas_hopper, *operands)

    @settings(max_examples=3)
    @given(places=st.permutations(range(in_blocks * out_blocks)), seed=st.integers(0, 99))
    def check(places, seed):
        mask = np.zeros(in_blocks * out_blocks, bool)
        mask[places[:stored]] = True
        layout = BlockLayout.from_mask(mask.reshape(in_blocks, out_blocks), block)
        operands = draw(layout, 37, jnp.bfloat16, seed)
        with simulated_hopper():
            actual = program(*operands, pad_tables(layout.tables(), in_blocks, out_blocks))
        assert_all_close(actual, exact(layout, *operands), jnp.bfloat16)

    check()
    assert len(programs) <= 2  # The first program of a process is traced twice.


@needs_mosaic
@pytest.mark.parametrize(
    ("block", "cluster", "splits", "lines"),
    [
        *some([(128, 2, 1, 1), (64, 1, 2, 1), (32, 2, 1, 4)], 64),
        pytest.param(64, 2, 1, 2, marks=pytest.mark.nightly),
        pytest.param(256, 1, 1, 1, marks=pytest.mark.nightly),
    ],
)
def test_many_small_tiles_have_no_race(block, cluster, splits, lines):
    """Several tiles in every loop, clusters, token splits; barriers order every memory access."""
    layout = BlockLayout.from_mask(IRREGULAR.mask, block)
    operands = draw(layout, 150, jnp.bfloat16)
    config = small_tiles(block, cluster, splits, lines)
    with simulated_hopper(detect_races=True):
        run = jax.jit(lambda *o: fused(pallas_hopper, *o, layout.tables(), tuning=config))
        actual = run(*operands)
    assert_all_close(actual, exact(layout, *operands), jnp.bfloat16)


@needs_mosaic
@pytest.mark.parametrize("tokens", some([1, 300, 1001], 1001))
def test_products_of_any_number_of_tokens_lower(tokens):
    layout = make_layout("pixelfly", 512, 512, 128, 1 / 2)
    x = jax.ShapeDtypeStruct((tokens, 512), jnp.bfloat16)
    values = jax.ShapeDtypeStruct((layout.nnz, 128, 128), jnp.bfloat16)

    def products(x, values, dy):
        y, pull = jax.vjp(
            lambda x, values: pallas_hopper.block_sparse_matmul(x, values, layout.tables()),
            x,
            values,
        )
        return y, *pull(dy)

    with targeted_gpu():
        jax.jit(products).trace(x, values, x).lower(lowering_platforms=("cuda",))


@needs_mosaic
@pytest.mark.parametrize("block", [64, pytest.param(128, marks=pytest.mark.nightly)])
def test_the_derivative_of_the_activation_before_is_fused(block):
    """dy Wᵀ gelu'(z) is the gradient of z in gelu(z) W."""
    layout = BlockLayout.from_mask(IRREGULAR.mask, block)
    z, values, dy, *_ = draw(layout, 150, jnp.bfloat16)
    with simulated_hopper(detect_races=True):
        dz = jax.jit(
            lambda dy, values, z: pallas_hopper.input_gradient(
                dy,
                values,
                layout.tables(),
                activation="gelu",
                preactivation=z,
                tuning=small_tiles(block),
            )
        )(dy, values, z)
    dy, values = np.asarray(dy, np.float64), np.asarray(values, np.float64)
    assert_all_close([dz], [dy @ layout.to_dense(values).T * exact_gelu(z)[1]], jnp.bfloat16)


@needs_mosaic
@pytest.mark.parametrize("block", [64, pytest.param(128, marks=pytest.mark.nightly)])
def test_float32_is_as_exact_as_float32(block):
    """Numbers of many magnitudes; the last of three lines has no neighbour to merge with."""
    layout = BlockLayout.from_mask(IRREGULAR.mask[:, :3], block)
    x, values, dy, *_ = draw(layout, 70, np.float32)
    x = x * np.logspace(-3, 3, x.shape[1], dtype=np.float32)

    def products(x, values, dy, tables):
        y, pullback = jax.vjp(
            lambda x, v: pallas_hopper.block_sparse_matmul(x, v, tables), x, values
        )
        return y, *pullback(dy)

    with simulated_hopper():
        actual = jax.jit(products)(x, values, dy, layout.tables())
    x, values, dy = (np.asarray(array, np.float64) for array in (x, values, dy))
    dense = layout.to_dense(values)
    exact_ = x @ dense, dy @ dense.T, layout.from_dense(x.T @ dy)
    bounds = (
        np.abs(x) @ np.abs(dense),
        np.abs(dy) @ np.abs(dense).T,
        layout.from_dense(np.abs(x).T @ np.abs(dy)),
    )
    for got, right, bound in zip(actual, exact_, bounds):
        assert got.dtype == jnp.float32
        assert np.all(np.abs(got - right) <= 2**-20 * bound)  # A tf32 product has errors of 2⁻¹¹.


def test_components_of_a_float32_sum_to_it():
    x = np.concatenate([np.random.default_rng(0).normal(size=999) * 1e3, [0, -1, np.inf, 1e-30]])
    x = x.astype(np.float32)
    components = jax.jit(split_float32)(x)
    assert all(component.dtype == jnp.bfloat16 for component in components)
    total = sum(np.asarray(component, np.float64) for component in components)
    np.testing.assert_allclose(total, x, rtol=2**-24)


@settings(max_examples=examples(40))
@given(
    mask=hnp.arrays(bool, hnp.array_shapes(min_dims=2, max_dims=2, max_side=7)),
    width=st.sampled_from([1, 2, 4]),
    padding=st.integers(0, 3),
    traced=st.booleans(),
)
def test_merged_lines_have_every_stored_block_once(mask, width, padding, traced):
    mask[0, 0] = True
    layout = BlockLayout.from_mask(mask, 32)
    tables = layout.tables()
    tables = pad_tables(
        tables, tables.in_index.shape[1] + padding, tables.out_index.shape[1] + padding
    )
    build = jax.jit(merge_lines, static_argnums=(2, 3, 4)) if traced else merge_lines
    for index, slot, slots in (
        (tables.in_index, tables.in_slot, layout.slots),
        (tables.out_index, tables.out_slot, layout.slots.T),
    ):
        merged = build(index, slot, width, len(slots), layout.nnz)
        others, slots_by_position = (np.asarray(table) for table in merged)
        assert slots_by_position.shape == (-(-len(index) // width), others.shape[1], width)
        # Stored positions come first; there each line has a slot, inside or outside of values.
        present = (slots_by_position >= 0).any(2)
        assert np.all(np.diff(present.astype(int), axis=1) <= 0)
        np.testing.assert_array_equal(present, (slots_by_position >= 0).all(2))
        restored = np.full((len(slots), len(slots_by_position) * width), -1)
        for line, position, member in np.argwhere(
            (slots_by_position >= 0) & (slots_by_position < layout.nnz)
        ):
            place = others[line, position], line * width + member
            assert restored[place] == -1
            restored[place] = slots_by_position[line, position, member]
        np.testing.assert_array_equal(restored[:, : slots.shape[1]], slots)
        assert np.all(restored[:, slots.shape[1] :] == -1)
        if not traced and width > 1:
            assert others.shape[1] == present.sum(1).max()


def test_lines_are_merged_if_that_is_faster():
    """Monarch's adjacent output blocks share their inputs, but its adjacent input blocks share no
    outputs in a weight that widens; random blocks share hardly any."""
    chosen = {}
    for pattern in ("monarch", "random"):
        layout = make_layout(pattern, 5120, 15360, 64, 1 / 8)
        x = jax.ShapeDtypeStruct((2048, 5120), jnp.bfloat16)
        values = jax.ShapeDtypeStruct((layout.nnz, 64, 64), jnp.bfloat16)
        with targeted_gpu():
            config = pallas_hopper.default_tuning(x, values, layout.tables())
        chosen[pattern] = [
            tiles.lines for tiles in (config.forward, config.input_gradient, config.weight_gradient)
        ]
    assert chosen == {"monarch": [2, 1, 2], "random": [1, 1, 1]}


@settings(max_examples=examples(30))
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=6), padding=st.integers(0, 9))
def test_the_stored_blocks_of_a_line_are_counted(counts, padding):
    fan = max(1, max(counts) + padding)
    slot = np.where(np.arange(fan) < np.array(counts)[:, None], 7, -1)
    for line, count in enumerate(counts):
        assert count_stored(jnp.asarray(slot.reshape(-1)), fan, 1, line, slot[line, -1]) == count


PROJECTIONS = [(5120, 15360), (5120, 5120), (5120, 20480), (20480, 5120)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tokens", some([1, 300, 2048, 16384], 300, 16384))
def test_default_tiles_of_13b_fit_shared_memory(tokens, dtype):
    dtype = jnp.dtype(dtype)
    for shape, block in itertools.product(PROJECTIONS, (32, 64, 128)):
        layout = make_layout("pixelfly", *shape, block, 1 / 8)
        x = jax.ShapeDtypeStruct((tokens, shape[0]), dtype)
        values = jax.ShapeDtypeStruct((layout.nnz, block, block), dtype)
        with targeted_gpu():
            config = pallas_hopper.default_tuning(x, values, layout.tables(), derivative=True)
        assert config.multiprocessors == 132
        elementwise, size = dtype == jnp.bfloat16, dtype.itemsize
        assert tuning.product_bytes(config.forward, False, size) <= tuning.SHARED_BYTES
        assert tuning.product_bytes(config.input_gradient, elementwise, size) <= tuning.SHARED_BYTES
        assert tuning.gradient_bytes(config.weight_gradient, block) <= tuning.SHARED_BYTES
        assert min(config.forward.stages, config.weight_gradient.stages) >= 3


def kernels_chosen(layout, name=None, dtype=jnp.bfloat16, rows=FEW_ROWS + 1):
    """Return the number of Pallas kernels in a forward and backward pass through the API."""
    x, values, dy, *_ = draw(layout, rows, dtype)

    def gradients(x, values, dy):
        y, pullback = jax.vjp(
            lambda x, v: api.block_sparse_matmul(x, v, layout.tables(), name), x, values
        )
        return y, pullback(dy)

    return str(jax.make_jaxpr(gradients)(x, values, dy)).count("mpmd_map[")


@needs_mosaic
def test_the_kernels_are_chosen_where_they_run():
    layout, other = make_layout("cyclic", 256, 256, 64, 0.5), make_layout("cyclic", 64, 64, 16, 0.5)
    with targeted_gpu():
        assert kernels_chosen(layout) == 3
        assert kernels_chosen(layout, rows=FEW_ROWS) == 0
        assert kernels_chosen(layout, "xla") == 0
        assert kernels_chosen(layout, dtype=np.float32) == 3
        assert kernels_chosen(layout, dtype=np.float16) == 0
        assert kernels_chosen(other) == 0
    with targeted_gpu("NVIDIA A100-SXM4-80GB", 108):
        assert kernels_chosen(layout) == 0
    assert kernels_chosen(layout) == 0


def test_another_gpu_runs_xla_and_logs_it_once(monkeypatch):
    lines = []
    monkeypatch.setattr(
        dispatch.logging, "info", lambda text, *components: lines.append(text % components)
    )
    dispatch.log_choice.cache_clear()
    layout = make_layout("cyclic", 256, 256, 64, 0.5)
    with targeted_gpu("Tesla T4", 40):
        for _ in range(2):
            kernels_chosen(layout)
    (line,) = lines
    assert line.startswith("block_sparse_matmul: implementation xla on gpu, because this is ")


def refused(layout, dtype=jnp.bfloat16, kind="NVIDIA H200", **options):
    x, values, *_ = draw(layout, 8, dtype)
    with pytest.raises(UserError) as refusal, targeted_gpu(kind):
        api.block_sparse_matmul(x, values, layout.tables(), "pallas_hopper", **options)
    return str(refusal.value)


@needs_mosaic
def test_illegal_operands_are_refused():
    legal = make_layout("cyclic", 256, 256, 64, 0.5)
    assert "legal: 32, 64, 128, 256" in refused(make_layout("cyclic", 64, 64, 16, 0.5))
    assert "legal: bfloat16, float32" in refused(legal, np.float16)
    x, values, *_ = draw(legal, 8, jnp.bfloat16)
    with pytest.raises(UserError, match=r"legal: bfloat16 \(8, 256\)"), targeted_gpu():
        z = np.zeros((8, 256), np.float32)
        pallas_hopper.input_gradient(x, values, legal.tables(), activation="gelu", preactivation=z)
    assert "compute capability 9.0" in refused(legal, kind="NVIDIA A100-SXM4-80GB")
    with pytest.raises(UserError, match=r"runs on gpu, and this is cpu\. Legal here"):
        kernels_chosen(legal, "pallas_hopper")


@pytest.mark.skipif(
    jax.__version_info__ >= pallas_hopper.NEEDED_JAX, reason="this jax has all that is needed"
)
def test_an_old_jax_is_refused():
    layout = make_layout("cyclic", 256, 256, 64, 0.5)
    assert "legal: 0.11 or newer" in refused(layout)
    with targeted_gpu():
        assert kernels_chosen(layout) == 0
