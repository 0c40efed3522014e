"""Training adapters: the frozen weights, the first step's function, gradients, memory and FLOPs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import some
from small_models import tables_of

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.step import (
    abstract_state,
    initial_state,
    jitted_train_step,
    make_train_step,
)
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.planner import memory, plan_memory
from sparse_dataflow.runs import adapted_model
from sparse_dataflow.runs.families import FAMILIES

SHAPE = {"num_layers": 2, "d_model": 32, "num_heads": 4, "d_ff": 64, "vocab_size": 48}
DENSE = ModelConfig(**SHAPE, max_len=16)
SPARSE = DENSE.with_linears(LinearSpec("block_sparse", "monarch", 0.5, 8))
BASES = {
    "dense": DENSE,
    "llama": dataclasses.replace(DENSE, **FAMILIES["llama"], num_kv_heads=2),
    "sparse": SPARSE,
    "sparse by depth": dataclasses.replace(SPARSE, density_by_depth=(2.0, 1.0)),
    "bfloat16": dataclasses.replace(DENSE, compute_dtype="bfloat16"),
}
TRAINING = TrainingConfig(
    steps=4, batch=4, sequence=8, learning_rate=1e-2, adapter_rank=3, adapter_alpha=6.0
)
TOKENS = np.random.default_rng(0).integers(0, 48, (4, 9)).astype(np.int32)
BATCH = Batch.from_windows(TOKENS)
each_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES)


def start(base, training=TRAINING):
    """Returns (config with adapters, initial state, layout tables)."""
    model = adapted_model.with_adapters(base, training.adapter_rank, training.frozen_dtype)
    state = initial_state(model, training)
    return model, state._replace(rest=stacks.fixed_layouts(state.rest)), tables_of(model)


def same_bits(a, b):
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(x, y), a, b)))


@pytest.mark.parametrize("base", some(BASES, "sparse"))
def test_training_changes_every_factor_and_no_bit_of_the_base(base):
    model, state, _ = start(base)
    step = jax.jit(make_train_step(model, TRAINING))
    before = jax.device_get(state)
    for _ in range(2):
        state, report = step(state, BATCH, np.float32(1e-2))
    assert same_bits(before.rest, state.rest)
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), before.params, state.params)
    assert all(jax.tree.leaves(moved)) and np.isfinite(report.loss)
    names = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(state.params)}
    assert names == {"a_kernel", "b_kernel"}
    assert jax.tree.structure(state.moments[1].mu) == jax.tree.structure(state.params)


@pytest.mark.parametrize("base", some(BASES, "sparse"))
def test_before_the_first_step_the_model_is_its_base(base):
    model, state, tables = start(base)
    weights = state.merged
    groups = weights["blocks"] if isinstance(weights["blocks"], tuple) else (weights["blocks"],)
    terms = ("a_kernel", "b_kernel", "gate")
    bare = [
        {name: {k: v for k, v in m.items() if k not in terms} for name, m in group.items()}
        for group in groups
    ]
    base_params = {**weights, "blocks": tuple(bare) if len(bare) > 1 else bare[0]}
    logits = jax.jit(
        lambda model, params: whole.logits(model, weights_of(model, params, tables), TOKENS),
        static_argnums=0,
    )
    assert np.array_equal(logits(model, weights), logits(base, base_params))


def test_a_bfloat16_base_is_stored_in_bfloat16_and_computes_the_same_bits():
    model, state, _ = start(BASES["bfloat16"])
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state.without_layouts().rest)
    assert state.rest["blocks"]["mlp_in"]["kernel"].dtype == jnp.bfloat16
    assert state.rest["head"]["norm"]["scale"].dtype == jnp.float32
    step = jax.jit(make_train_step(model, TRAINING))
    results = [
        step(state._replace(rest=merged(frozen, state.rest)), BATCH, np.float32(1e-2))
        for frozen in (state.rest, wide)
    ]
    assert same_bits(results[0][0].params, results[1][0].params)
    assert float(results[0][1].loss) == float(results[1][1].loss)


@pytest.mark.parametrize("base", some({"dense": DENSE, "sparse": SPARSE}, "sparse"))
def test_gradients_are_those_of_merged_dense_weights_in_float64(base):
    """d/dA and d/dB follow from the gradient G of the merged weight: s G Bᵀ and s Aᵀ G."""
    model, state, tables = start(base)
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda p: rng.normal(size=p.shape, scale=0.1), state.params)
    scale = TRAINING.adapter_scale
    layouts = stacks.layouts_of(model, tables)
    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf, "float64"), tree)  # noqa: E731
        params, frozen = wide(params), wide(jax.device_get(state.without_layouts().rest))
        dense = jax.tree.map(lambda leaf: leaf, frozen)
        for name, factors in params["blocks"].items():
            module = dict(frozen["blocks"][name])
            module.pop("gate")
            if name in layouts:
                values = module.pop("values")
                module["kernel"] = jnp.stack(
                    [lay.to_dense(np.asarray(v)) for lay, v in zip(layouts[name], values)]
                )
            module["kernel"] += scale * factors["a_kernel"] @ factors["b_kernel"]
            dense["blocks"][name] = module
        plain = dataclasses.replace(base, linears={})
        gradient = jax.jit(
            lambda model, params, frozen: whole.loss_and_gradients(
                model,
                params,
                stacks.fixed_layouts(merged(frozen, tables)) if frozen else (),
                BATCH,
                whole.Accumulation(dtype="float64"),
            )[1],
            static_argnums=0,
        )
        expected, gradients = gradient(plain, dense, ()), gradient(model, params, frozen)
        for name, factors in params["blocks"].items():
            G = expected["blocks"][name]["kernel"]
            a_gradient = scale * G @ factors["b_kernel"].swapaxes(1, 2)
            b_gradient = scale * factors["a_kernel"].swapaxes(1, 2) @ G
            actual = gradients["blocks"][name]
            np.testing.assert_allclose(actual["a_kernel"], a_gradient, rtol=1e-4, atol=1e-7)
            np.testing.assert_allclose(actual["b_kernel"], b_gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_weights_of_the_targets_are_those_of_the_loss_and_its_gradient():
    weights = np.random.default_rng(2).random((4, 8)).astype(np.float32)
    weights /= weights.sum()
    params = gpt.init(DENSE, jax.random.key(0))
    run = jax.jit(
        lambda params, micro_batches: whole.loss_and_gradients(
            DENSE,
            params,
            (),
            Batch.from_windows(TOKENS, weights),
            whole.Accumulation(micro_batches),
        ),
        static_argnums=1,
    )
    metrics, gradients = run(params, 1)
    loss = metrics["loss"].number()
    direct = jax.jit(
        jax.value_and_grad(
            lambda p: whole.loss(
                DENSE, weights_of(DENSE, p, {}), Batch.from_windows(TOKENS, weights)
            )
        )
    )(params)
    np.testing.assert_allclose(loss, direct[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradients, direct[1])
    two = run(params, 2)
    np.testing.assert_allclose(two[0]["loss"].number(), loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), two[1], gradients)


def planned_as_compiled(model, training):
    """The plan of a step, whose state and sum are those of the compiled one."""
    shapes = abstract_state(model, training)
    step = jitted_train_step(model, training, SINGLE_DEVICE, shapes)
    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    arguments = shapes._replace(rest=()), shapes.rest, Batch(tokens, tokens), np.float32(0)
    analysis = step.lower(*arguments).compile().memory_analysis()
    plan = plan_memory.training_bytes(model, training)
    state = plan.parameters + plan.moments
    assert state == pytest.approx(analysis.argument_size_in_bytes, rel=0.01)
    everything = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    assert plan.total == pytest.approx(everything, rel=0.25)
    return plan


@pytest.mark.parametrize("remat", some(["none", "full"], "full"))
def test_the_plan_of_memory_is_that_of_the_compiled_step(remat):
    layers = whole.UNROLL_LAYERS + 1
    base = ModelConfig(layers, 256, 4, 1024, 512, 128, remat=remat)
    training = TrainingConfig(steps=1, batch=2, sequence=128, adapter_rank=4)
    model = adapted_model.with_adapters(base, 4)
    plan = planned_as_compiled(model, training)
    # Weights, and 16 bytes for each parameter of the adapters.
    expected = memory.frozen_bytes(model) + 16 * memory.term_count(model)
    whole_training = dataclasses.replace(training, adapter_rank=0)
    assert plan.state == expected < plan_memory.training_bytes(base, whole_training).state / 3


def test_flops_leave_out_the_gradients_of_frozen_weights():
    model = adapted_model.with_adapters(DENSE, 3)
    forward = cost.flops_per_token(model, 8, training=False)
    steps = cost.flops_per_token(model, 8, adapters=True).sections
    every = cost.flops_per_token(model, 8).sections
    assert steps["attention"] == every["attention"]
    assert steps["head"] == 2 * forward.head
    sides = sum(DENSE.projection_shape("mlp_in"))
    low_rank = 2 * DENSE.num_layers * 3 * sides
    assert steps["mlp_in"] == pytest.approx(2 * forward.sections["mlp_in"] + low_rank)


@pytest.mark.parametrize(
    ("base", "rank", "words"),
    [
        (DENSE, 33, r"adapter_rank=33 is above 32, the features .*; legal: 1 to 32"),
        (DENSE.with_linears(LinearSpec(rank=2), ["mlp_in"]), 4, "mlp_in have a low-rank term"),
    ],
)
def test_a_model_that_takes_no_adapters_is_named(base, rank, words):
    with pytest.raises(UserError, match=words):
        adapted_model.with_adapters(base, rank)


def test_muon_has_nothing_to_train():
    with pytest.raises(UserError, match=r"muon orthogonalises .*legal with it: adamw"):
        TrainingConfig(optimizer="muon", adapter_rank=4)
