"""What the Hopper kernels do beyond the shared suite: fusion, accumulation, tiles, races."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_products import assert_all_close, draw, exact, exact_gelu, fused
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_hopper import simulated_hopper, targeted_gpu

from sparse_dataflow.errors import UserError
from sparse_dataflow.kernels.block_sparse_matmul import api, pallas_hopper
from sparse_dataflow.kernels.block_sparse_matmul import tuning_hopper as tuning
from sparse_dataflow.kernels.block_sparse_matmul.pallas_hopper_plan import stored_of
from sparse_dataflow.sparsity.layout import BlockLayout, widened
from sparse_dataflow.sparsity.patterns import make_layout

pytestmark = pytest.mark.usefixtures("quick_compile")

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < pallas_hopper.NEEDED_JAX,
    reason=f"Mosaic GPU kernels need jax >= 0.11, not {jax.__version__}",
)


IRREGULAR = BlockLayout.from_mask(
    np.array([[1, 0, 1, 0], [1, 0, 1, 1], [0, 0, 1, 0]], bool), 64
)  # An empty column, and columns of one, two and three blocks.


def small_tiles(block, cluster=1, splits=1):
    """Tiles so small that everything takes several."""
    side = min(block, 128)
    product = tuning.ProductTiles(
        rows=64, columns=side, depth=min(block, 64), stages=2, cluster=cluster, group=1
    )
    return tuning.TuningConfig(
        forward=product,
        input_gradient=dataclasses.replace(product, stages=3, group=2),
        weight_gradient=tuning.GradientTiles(
            side=side, width=2 if block < 128 else 1, depth=64, stages=2, splits=splits
        ),
        multiprocessors=2,
    )


@needs_mosaic
def test_any_layout_runs_fused_in_one_program():
    """Irregular layouts with empty lines, and tokens that are no multiple of a tile."""
    in_blocks, out_blocks, stored, block = 3, 5, 8, 64
    programs = []

    @jax.jit
    def program(*operands):
        programs.append(1)
        return fused(pallas_hopper, *operands)

    @settings(max_examples=3, deadline=None)
    @given(places=st.permutations(range(in_blocks * out_blocks)), seed=st.integers(0, 99))
    def check(places, seed):
        mask = np.zeros(in_blocks * out_blocks, bool)
        mask[places[:stored]] = True
        layout = BlockLayout.from_mask(mask.reshape(in_blocks, out_blocks), block)
        operands = draw(layout, 37, jnp.bfloat16, seed)
        with simulated_hopper():
            actual = program(*operands, widened(layout.tables(), in_blocks, out_blocks))
        assert_all_close(actual, exact(layout, *operands), jnp.bfloat16)
        np.testing.assert_array_equal(actual[4], operands[2])

    check()
    assert len(programs) == 1


@needs_mosaic
@pytest.mark.parametrize(
    ("block", "cluster", "splits", "keep"),
    [(128, 2, 1, True), (64, 1, 2, False), (32, 2, 1, False), (256, 1, 1, True)],
)
def test_many_small_tiles_have_no_race(block, cluster, splits, keep):
    """Several tiles of everything, over clusters and shares of the tokens; the pre-activation
    kept, or made again; every access to memory ordered by a barrier."""
    layout = BlockLayout.from_mask(IRREGULAR.mask, block)
    operands = draw(layout, 150, jnp.bfloat16)
    config = small_tiles(block, cluster, splits)
    with simulated_hopper(detect_races=True):
        run = jax.jit(
            lambda *o: fused(
                pallas_hopper, *o, layout.tables(), tuning=config, keep_preactivation=keep
            )
        )
        actual = run(*operands)
    assert_all_close(actual, exact(layout, *operands), jnp.bfloat16)


@needs_mosaic
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("splits", [1, 3])
def test_weight_gradients_add_into_a_float32_accumulator(block, splits):
    layout = BlockLayout.from_mask(IRREGULAR.mask, block)
    x, values, dy, *_ = draw(layout, 130, jnp.bfloat16)
    accumulator = values.astype(np.float32)
    config = small_tiles(block, splits=splits)
    with simulated_hopper(detect_races=True):
        total = jax.jit(
            lambda x, dy, a: pallas_hopper.weight_gradient(
                x, dy, layout.tables(), accumulator=a, tuning=config
            )
        )(x, dy, accumulator)
    dense = np.asarray(x, np.float64).T @ np.asarray(dy, np.float64)
    assert total.dtype == jnp.float32
    assert_all_close([total], [accumulator + layout.from_dense(dense)], np.float32)


@needs_mosaic
@pytest.mark.parametrize("block", [64, 128])
def test_the_derivative_of_the_activation_before_is_fused(block):
    """dy Wᵀ gelu'(z) is the gradient of z in gelu(z) W."""
    layout = BlockLayout.from_mask(IRREGULAR.mask, block)
    z, values, dy, *_ = draw(layout, 150, jnp.bfloat16)
    with simulated_hopper(detect_races=True):
        dz = jax.jit(
            lambda dy, values, z: pallas_hopper.input_gradient(
                dy, values, layout.tables(), preactivation=z, tuning=small_tiles(block)
            )
        )(dy, values, z)
    dy, values = np.asarray(dy, np.float64), np.asarray(values, np.float64)
    assert_all_close([dz], [dy @ layout.to_dense(values).T * exact_gelu(z)[1]], jnp.bfloat16)


@needs_mosaic
def test_gradients_follow_finite_differences():
    """Along a random direction: of the exact function, as differences of bfloat16 are rounding."""
    layout = BlockLayout.from_mask(IRREGULAR.mask, 64)
    operands = draw(layout, 40, jnp.bfloat16)
    with simulated_hopper():
        gradients = jax.jit(lambda *o: fused(pallas_hopper, *o, layout.tables()))(*operands)[1:4]
    x, values, dy, bias, residual = (np.asarray(array, np.float64) for array in operands)
    rng, step = np.random.default_rng(1), 1e-6
    directions = [rng.normal(size=array.shape) for array in (x, values, bias)]

    def along(amount):
        moved = [a + amount * d for a, d in zip((x, values, bias), directions)]
        y = exact(layout, moved[0], moved[1], dy, moved[2], residual)[0]
        return np.sum(y * dy)

    slope = (along(step) - along(-step)) / (2 * step)
    products = [np.asarray(g, np.float64) * d for g, d in zip(gradients, directions)]
    size = sum(np.sqrt(np.sum(p**2)) for p in products)
    assert abs(sum(p.sum() for p in products) - slope) <= 2e-2 * size


@settings(max_examples=30, deadline=None)
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=6), padding=st.integers(0, 9))
def test_the_stored_blocks_of_a_line_are_counted(counts, padding):
    fan = max(1, max(counts) + padding)
    slot = np.where(np.arange(fan) < np.array(counts)[:, None], 7, -1)
    for line, count in enumerate(counts):
        assert stored_of(jnp.asarray(slot.reshape(-1)), fan, line, slot[line, -1]) == count


PROJECTIONS = [(5120, 15360), (5120, 5120), (5120, 20480), (20480, 5120)]


@pytest.mark.parametrize("tokens", [1, 300, 2048, 16384])
def test_default_tiles_of_13b_fit_shared_memory(tokens):
    for shape, block in itertools.product(PROJECTIONS, (64, 128)):
        layout = make_layout("pixelfly", *shape, block, 1 / 8)
        x = jax.ShapeDtypeStruct((tokens, shape[0]), jnp.bfloat16)
        values = jax.ShapeDtypeStruct((layout.nnz, block, block), jnp.bfloat16)
        with targeted_gpu():
            config = pallas_hopper.default_tuning(x, values, layout.tables(), residual=True)
        assert config.multiprocessors == 132
        assert tuning.product_bytes(config.forward, True) <= tuning.SHARED_BYTES
        assert tuning.product_bytes(config.input_gradient, False) <= tuning.SHARED_BYTES
        assert tuning.gradient_bytes(config.weight_gradient, block) <= tuning.SHARED_BYTES
        assert min(config.forward.stages, config.weight_gradient.stages) >= 3
        assert config.weight_gradient.splits <= max(1, tokens // 256)


def kernels_chosen(layout, name=None, dtype=jnp.bfloat16):
    """How many Pallas kernels a forward and backward pass through the API has."""
    x, values, dy, *_ = draw(layout, 8, dtype)

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
        assert kernels_chosen(layout, "xla") == 0
        assert kernels_chosen(layout, dtype=np.float32) == 0
        assert kernels_chosen(other) == 0
    with targeted_gpu("NVIDIA A100-SXM4-80GB", 108):
        assert kernels_chosen(layout) == 0
    assert kernels_chosen(layout) == 0


def refused(layout, dtype=jnp.bfloat16, kind="NVIDIA H200", **options):
    x, values, *_ = draw(layout, 8, dtype)
    with pytest.raises(UserError) as refusal, targeted_gpu(kind):
        pallas_hopper.block_sparse_matmul(x, values, layout.tables(), **options)
    return str(refusal.value)


@needs_mosaic
def test_what_cannot_run_is_refused_in_words():
    legal = make_layout("cyclic", 256, 256, 64, 0.5)
    assert "legal: 32, 64, 128, 256" in refused(make_layout("cyclic", 64, 64, 16, 0.5))
    assert "legal: bfloat16" in refused(legal, np.float32)
    assert "legal: gelu" in refused(legal, activation="relu")
    assert "legal: (256,)" in refused(legal, bias=np.zeros(8, np.float32))
    assert "legal: bfloat16 (8, 256)" in refused(legal, residual=np.zeros((8, 256), np.float32))
    assert "compute capability 9.0" in refused(legal, kind="NVIDIA A100-SXM4-80GB")
    with pytest.raises(UserError, match="runs on gpu, and this is cpu; legal here"):
        kernels_chosen(legal, "pallas_hopper")


@pytest.mark.skipif(
    jax.__version_info__ >= pallas_hopper.NEEDED_JAX, reason="this jax has all that is needed"
)
def test_an_old_jax_is_refused_in_words():
    layout = make_layout("cyclic", 256, 256, 64, 0.5)
    assert "legal: 0.11 or newer" in refused(layout)
    with targeted_gpu():
        assert kernels_chosen(layout) == 0


@needs_mosaic
def test_a_float32_accumulator_is_asked_for():
    layout = make_layout("cyclic", 256, 256, 64, 0.5)
    x, values, dy, *_ = draw(layout, 8, jnp.bfloat16)
    with pytest.raises(UserError, match="legal: float32"), targeted_gpu():
        pallas_hopper.weight_gradient(x, dy, layout.tables(), accumulator=jnp.asarray(values))
