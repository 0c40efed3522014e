"""Moments and gradients in bfloat16: what is rounded, and the effect on training, planner,
checkpoints and executors."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from marks import some
from small_models import fixed, shapes_of, tables_of

from sparse_dataflow.compile import array_table as describe
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE
from sparse_dataflow.core.optim.optimizers import adam_state, make_optimizer, map_moments
from sparse_dataflow.core.training.saved_state import SavedState, identity
from sparse_dataflow.core.training.step import abstract_state, initial_state, make_train_step
from sparse_dataflow.core.training.transitions import change_model
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.planner import plan_memory
from sparse_dataflow.relay.relay_executor import RelayExecutor

DENSE = ModelConfig(2, 32, 4, 64, vocab_size=48, max_len=8)
SPARSE = DENSE.with_linears(LinearSpec("block_sparse", "monarch", density=0.5, block=8))
TRAINING = TrainingConfig(steps=30, batch=4, sequence=8, state_dtype="bfloat16")
WIDE = dataclasses.replace(TRAINING, state_dtype="float32")
MUON = dataclasses.replace(TRAINING, optimizer="muon")
# Each sequence counts up with its own increment.
TOKENS = np.arange(120, dtype=np.int32).reshape(30, 4, 1) * 7
TOKENS = (TOKENS + np.arange(9, dtype=np.int32) * np.arange(1, 5, dtype=np.int32)[:, None]) % 48
ROUNDING = 2.0**-8
"""Of bfloat16, relative."""


@functools.cache
def shapes(model):
    return shapes_of(model)


def draw_params(model):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: rng.normal(size=s.shape, scale=0.2).astype("f4"), shapes(model))


@functools.cache
def program(model, training):
    """(layout tables, jitted step)."""
    tables = tables_of(model)
    return tables, jax.jit(make_train_step(model, training))


def trained(model, training, steps, state=None):
    """Trains up to step `steps`, from `state` or the initial one; returns (state, losses)."""
    tables, step = program(model, training)
    state = initial_state(model, training) if state is None else state
    state, losses = state._replace(rest=fixed(tables)), []
    for windows in TOKENS[int(state.step) : steps]:
        state, report = step(state, Batch.from_windows(windows), np.float32(3e-3))
        losses.append(float(report.loss))
    return state._replace(rest=tables), losses


def bits(state):
    arrays = state._replace(key=jax.random.key_data(state.key))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(arrays)]


@settings(max_examples=8)
@given(st.integers(0, 2**31), st.integers(-12, 4))
def test_a_step_is_a_float32_step_with_moments_rounded_at_the_end(seed, exponent):
    rng = np.random.default_rng(seed)
    params = draw_params(DENSE)
    draw = lambda leaf: jnp.asarray(10.0**exponent * rng.normal(size=leaf.shape), "float32")  # noqa: E731
    gradients = jax.tree.map(draw, params)
    narrow, wide = make_optimizer(DENSE, TRAINING), make_optimizer(DENSE, WIDE)
    before = narrow.init(params)
    _, before = narrow.update(jax.tree.map(draw, params), before, params, learning_rate=-1.0)
    same = map_moments(lambda tree: jax.tree.map(jnp.float32, tree), before)
    mine, after = narrow.update(gradients, before, params, learning_rate=-1.0)
    right, unrounded = wide.update(gradients, same, params, learning_rate=-1.0)
    for leaf, other in zip(jax.tree.leaves(mine), jax.tree.leaves(right)):
        np.testing.assert_array_equal(leaf, other)
    for leaf, other in zip(
        jax.tree.leaves(adam_state(after)), jax.tree.leaves(adam_state(unrounded))
    ):
        np.testing.assert_array_equal(leaf, other.astype(leaf.dtype))


@settings(max_examples=8)
@given(st.floats(-6, 1), st.floats(-6, 1))
@example(0.0, -4.83203125)
def test_the_second_moment_approaches_any_square_and_decays_to_zero(before, after):
    # Within 8.5% of the square, from above and from below; see `optimizers.B2`.
    optimizer = make_optimizer(DENSE, dataclasses.replace(TRAINING, clip=1e9))
    params = {"head": {"norm": {"scale": jnp.ones(1)}}}
    state = optimizer.init(params)
    run = jax.jit(functools.partial(optimizer.update, learning_rate=-1.0))

    def steps(state, gradient, count):
        gradients = {"head": {"norm": {"scale": jnp.full(1, gradient, jnp.float32)}}}
        for _ in range(count):
            _, state = run(gradients, state, params)
        return float(adam_state(state).nu["head"]["norm"]["scale"][0]), state

    _, state = steps(state, 10**before, 150)
    second_moment, state = steps(state, 10**after, 700)
    assert second_moment == pytest.approx(10 ** (2 * after), rel=0.085)
    assert steps(state, 0.0, 200)[0] < 1e-3 * 10 ** (2 * after)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "micro_batches"), [(DENSE, 1), (SPARSE, 2)], ids=["dense", "sparse"]
)
def test_losses_agree_with_float32_to_half_a_percent_over_30_steps(model, micro_batches):
    mine, right = (
        trained(model, dataclasses.replace(training, micro_batches=micro_batches), 30)[1]
        for training in (TRAINING, WIDE)
    )
    np.testing.assert_allclose(mine, right, rtol=5e-3)
    assert right[-1] < 0.9 * right[0]


@pytest.mark.parametrize(
    "layers", some({"unrolled": 2, "scanned": whole.UNROLL_LAYERS + 1}, "scanned")
)
@pytest.mark.parametrize("remat", some(["none", "keep", "full"], "full"))
def test_a_gradient_is_the_float32_gradient_rounded_once(layers, remat):
    model = dataclasses.replace(DENSE, num_layers=layers, remat=remat)
    params = draw_params(model)

    def loss(p, dtype):
        return whole.loss_and_gradients(
            model, p, (), Batch.from_windows(TOKENS[0]), whole.Accumulation(dtype=dtype)
        )

    (narrow, mine), (wide, right) = (
        jax.jit(loss, static_argnums=1)(params, dtype) for dtype in ("bfloat16", "float32")
    )
    assert narrow["loss"].number() == pytest.approx(wide["loss"].number(), rel=1e-6)
    for rounded, exact in zip(jax.tree.leaves(mine), jax.tree.leaves(right)):
        assert rounded.dtype == "bfloat16" and exact.dtype == "float32"
        # The two programs may sum in different orders.
        noise = 1e-6 * np.abs(exact).max() + 1e-9
        np.testing.assert_allclose(rounded.astype("float32"), exact, rtol=ROUNDING, atol=noise)


@pytest.mark.parametrize("remat", some(["keep", "full"], "full"))
def test_no_float32_gradient_of_all_layers_is_allocated(remat):
    model = dataclasses.replace(DENSE, num_layers=4 * whole.UNROLL_LAYERS, remat=remat)
    tokens = jax.ShapeDtypeStruct((1, 9), jnp.int32)

    def allocated(dtype):
        def run(p, t):
            return whole.loss_and_gradients(
                model, p, (), Batch.from_windows(t), whole.Accumulation(dtype=dtype)
            )

        analysis = jax.jit(run).lower(shapes(model), tokens).compile().memory_analysis()
        return analysis.output_size_in_bytes, analysis.temp_size_in_bytes

    (narrow, narrow_temp), (wide, wide_temp) = allocated("bfloat16"), allocated("float32")
    blocks = sum(4 * leaf.size for leaf in jax.tree.leaves(shapes(model)["blocks"]))
    assert narrow < 0.52 * wide
    assert narrow_temp - wide_temp < blocks / 8


@pytest.mark.parametrize("training", some({"adamw": TRAINING, "muon": MUON}, "muon"))
@pytest.mark.parametrize("model", some({"dense": DENSE, "sparse": SPARSE}, "sparse"))
def test_a_resumed_training_has_the_same_bits(model, training, tmp_path):
    undisturbed, _ = trained(model, training, 6)
    halfway, _ = trained(model, training, 3)
    config = identity(model, training, EvolutionConfig(), "none")
    with Checkpoints(tmp_path, config=config) as checkpoints:
        checkpoints.save(3, SavedState.of(halfway), {})
    abstract = SavedState.of(abstract_state(model, training)._replace(rest=halfway.rest))
    restored, _ = Checkpoints(tmp_path, config=config).restore(abstract)
    resumed, _ = trained(model, training, 6, restored.state(model))
    assert bits(resumed) == bits(undisturbed)


def test_a_checkpoint_of_another_dtype_is_refused(tmp_path):
    state, _ = trained(DENSE, TRAINING, 1)
    config = identity(DENSE, TRAINING, EvolutionConfig(), "none")
    with Checkpoints(tmp_path, config=config) as checkpoints:
        checkpoints.save(1, SavedState.of(state), {})
    other = Checkpoints(tmp_path, config=identity(DENSE, WIDE, EvolutionConfig(), "none"))
    wide_state = SavedState.of(abstract_state(DENSE, WIDE))
    with pytest.raises(UserError, match=r'training\.state_dtype is "bfloat16" there'):
        other.restore(wide_state)
    with pytest.raises(UserError, match=r"mu.*bfloat16.*float32"):
        Checkpoints(tmp_path, config=config).restore(wide_state)


@given(
    st.sampled_from([DENSE, SPARSE]),
    st.sampled_from([TRAINING, WIDE, MUON]),
    st.sampled_from(["keep", "full"]),
)
def test_the_planned_bytes_are_the_bytes_of_the_arrays(model, training, remat):
    model = dataclasses.replace(model, remat=remat)
    tables = tables_of(model)
    state = abstract_state(model, training)
    arrays = SINGLE_DEVICE.arrays(state._replace(rest=tables), model, True, Batch())
    array_bytes = {group: describe.bytes_per_chip({group: tree}) for group, tree in arrays.items()}
    plan = plan_memory.training_bytes(model, training)
    assert array_bytes["parameters"] == plan.parameters
    assert array_bytes["gradients"] == plan.gradients
    assert array_bytes["moments"] == plan.moments


def test_a_new_term_has_moments_of_the_same_dtype():
    ranked = SPARSE.with_linears(dataclasses.replace(SPARSE.linear("qkv"), rank=2))
    state = change_model(initial_state(SPARSE, TRAINING), SPARSE, ranked)
    abstract = abstract_state(ranked, TRAINING)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state.moments) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), abstract.moments
    )


def test_illegal_dtypes_are_refused():
    with pytest.raises(UserError, match=r"float16 is unknown\. Legal: float32, bfloat16"):
        dataclasses.replace(TRAINING, state_dtype="float16")
    RelayExecutor().check(DENSE, TRAINING)
