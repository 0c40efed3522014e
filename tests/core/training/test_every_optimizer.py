"""Every optimizer trains pico over a mesh and resumes; what is no optimizer is refused."""

import dataclasses
import pathlib
import sys

import jax
import numpy as np
import optax
import pytest
from eight_devices import on_eight_devices
from marks import some

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import OPTIMIZERS, TrainingConfig
from sparse_dataflow.core.layouts.evolution import METHODS
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.optim import by_weight, factories
from sparse_dataflow.core.optim.optimizers import make_optimizer
from sparse_dataflow.core.training.step import initial_state
from sparse_dataflow.core.training.transitions import update_layouts
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.planner import plan_memory

OTHERS = ("optax.contrib:muon", "factories_of_users:own_chain")
NIGHTLY = [
    (name, variant)
    for name in (*OPTIMIZERS, *OTHERS)
    for variant in ("sparse", "dense")
    if (name, variant) not in (("lion", "dense"), ("adafactor", "sparse"), (OTHERS[1], "sparse"))
]
BLOCKS = LinearSpec("block_sparse", "monarch", 0.5, 8)
MODEL = ModelConfig(2, 32, 2, 64, 96, 16).with_linears(BLOCKS)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(pathlib.Path(__file__).parent), *sys.path])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("lion", "dense"),
        ("adafactor", "sparse"),
        (OTHERS[1], "sparse"),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in NIGHTLY),
    ],
)
def test_it_trains_pico_over_a_mesh_as_on_one_device_and_resumes_at_the_same_bits(
    name, variant, tmp_path
):
    result = on_eight_devices("core/training/optimizer_runs.py", name, variant, str(tmp_path))
    assert result["bits"]
    assert result["error"] < 1e-5
    # Rows and columns of Adafactor have the sharding of the first axes that they share.
    assert result["share"] < (0.5 if name == "adafactor" else 0.25)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("without_rate", r"a function of \(\), without learning_rate; legal: a function"),
        ("made", "is GradientTransformationExtraArgs, without learning_rate"),
        ("clips_globally", "couples the weights.*legal: training.clip"),
        ("injected", "does not follow learning_rate; legal"),
        ("goes_up", "goes up the gradient; legal: optax.scale_by_learning_rate"),
        ("returns_none", "cannot update a weight from its gradient"),
        ("masks_by_name", "cannot update a weight from its gradient"),
        ("raises", r"cannot update a weight from its gradient \(out of\)"),
        ("needs_the_loss", "cannot update a weight from its gradient.*value"),
        ("missing", "cannot be imported"),
        ("is_not_finite", "updates that are not finite; legal"),
        ("broadcasts", r"an update of shape .* for a weight of shape .*; legal"),
        ("ends_python", r"cannot update a weight from its gradient \(it ends Python with 3\)"),
    ],
)
def test_a_factory_that_no_training_can_use_is_refused_in_a_sentence(name, words):
    with pytest.raises(UserError, match=f"training.optimizer=factories_of_users:{name} .*{words}"):
        factories.factory(f"factories_of_users:{name}")


@pytest.mark.parametrize(
    "name",
    [
        "no_such_module:thing",
        "program_of_a_user:make",
        "os:system",
        "json:dumps",
        "optax:lbfgs",
        "optax:scale_by_adam",
    ],
)
def test_other_functions_are_refused_in_a_sentence(name):
    with pytest.raises(UserError, match=rf"^training\.optimizer={name} [^\n]*\.$"):
        factories.factory(name)


def test_a_weight_that_a_factory_cannot_update_is_refused_in_a_sentence():
    """The trial has matrices, and a model has vectors too."""
    name = "factories_of_users:only_for_matrices"
    transformation = factories.transformation(TrainingConfig(steps=1, optimizer=name), 0.5, 0.1)
    vector = np.ones(3, np.float32)
    with pytest.raises(UserError, match=f"{name} cannot update a weight from its gradient"):
        transformation.update(vector, transformation.init(vector), vector)


def test_random_keys_in_a_state_are_numbers_and_go_on():
    """Files and the relay's host store numbers alone."""
    training = TrainingConfig(steps=1, optimizer="factories_of_users:adds_noise")
    own, expected = factories.transformation(training, 0.5, 0.0), optax.noisy_sgd(0.5, key=7)
    weight = np.ones((3, 4), np.float32)
    state, expected_state = (each.init(weight) for each in (own, expected))
    for _ in range(2):
        step, state = own.update(weight, state, weight)
        expected_step, expected_state = expected.update(weight, expected_state, weight)
        np.testing.assert_allclose(step, expected_step, rtol=1e-6)
        state = jax.tree.map(np.asarray, state)
    assert all(leaf.dtype.kind in "iuf" for leaf in jax.tree.leaves(state))


def test_an_attribute_of_an_attribute_can_be_named():
    assert factories.factory("optax:contrib.muon") is optax.contrib.muon


@pytest.mark.parametrize("name", ["own_chain", "with_schedule", "with_lambda"])
def test_a_function_of_the_learning_rate_is_taken(name):
    assert callable(factories.factory(f"factories_of_users:{name}"))


@pytest.mark.parametrize("name", [*OPTIMIZERS[2:], "optax:adamw"])
def test_the_planner_counts_the_bytes_of_the_state(name):
    training = TrainingConfig(steps=1, optimizer=name)
    state = jax.eval_shape(
        lambda: make_optimizer(MODEL, training).init(gpt.init(MODEL, jax.random.key(0)))
    )
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    estimate = plan_memory.training_bytes(MODEL, training)
    assert estimate.moments == pytest.approx(size, rel=1e-3)


def test_a_matrix_optimizer_sees_each_layer_and_each_block_by_itself():
    training = TrainingConfig(steps=1, optimizer="optax.contrib:muon", weight_decay=0.0)
    params = gpt.init(MODEL, jax.random.key(0))
    states = by_weight.init(MODEL, training, params)
    rates, decays = (jax.tree.map(lambda _, v=v: v, params) for v in (1e-3, 0.0))
    gradients = jax.tree.map(lambda p: p + 0.1, params)
    updates, _ = by_weight.update(MODEL, training, gradients, states, params, rates, decays)
    values = np.asarray(updates["blocks"]["qkv"]["values"])
    # Muon's update of a square matrix is orthogonal, times the rate.
    sizes = np.linalg.svd(values / 1e-3, compute_uv=False)
    assert sizes.max() < 1.3 and sizes.min() > 0.2


def test_decay_and_rate_reach_each_weight_once():
    """A factory with `weight_decay` and one without move a weight alike."""
    for name in ("optax:adamw", "optax:adam"):
        training = TrainingConfig(steps=1, optimizer=name)
        transformation = factories.transformation(training, 0.5, 0.1)
        weight = np.full((3, 4), 2.0, np.float32)
        state = transformation.init(weight)
        step, _ = transformation.update(np.zeros_like(weight), state, weight)
        np.testing.assert_allclose(step, -0.5 * 0.1 * weight, rtol=1e-6)


def test_schedule_free_learning_is_evaluated_at_its_average():
    training = TrainingConfig(steps=1, optimizer="schedule_free", weight_decay=0.0)
    params = {"head": {"norm": {"scale": np.ones(4, np.float32)}}}
    states, rng, points = by_weight.init(MODEL, training, params), np.random.default_rng(0), []
    for _ in range(5):
        gradients = jax.tree.map(lambda p: rng.standard_normal(p.shape).astype(p.dtype), params)
        rates = jax.tree.map(lambda _: 0.1, params)
        updates, states = by_weight.update(
            MODEL, training, gradients, states, params, rates, jax.tree.map(lambda _: 0.0, params)
        )
        params = jax.tree.map(lambda p, u: np.asarray(p + u), params, updates)
        shape = factories.state_shapes(training, (4,))
        state = jax.tree.unflatten(jax.tree.structure(shape), states["head"]["norm"]["scale"])
        points.append(np.asarray(state.z))
    average = by_weight.evaluated(MODEL, training, (by_weight.WeightStates(states),), params)
    # At a constant rate all points weigh the same.
    np.testing.assert_allclose(average["head"]["norm"]["scale"], np.mean(points, 0), rtol=1e-4)


def test_the_state_of_others_stays_in_float32():
    with pytest.raises(UserError, match=r"state_dtype=bfloat16 with training\.optimizer=lion"):
        TrainingConfig(steps=1, optimizer="lion", state_dtype="bfloat16")
    with pytest.raises(UserError, match=r"training\.b2=0\.999 with .*legal: at most 0\.96"):
        dataclasses.replace(TrainingConfig(steps=1, b2=0.999), state_dtype="bfloat16")


@pytest.mark.parametrize(
    ("optimizer", "block"),
    some(
        [
            ("lion", 4),
            ("lion", 1),
            ("adafactor", 1),
            ("schedule_free", 2),
            ("optax.contrib:muon", 1),
        ],
        "adafactor",
    ),
)
def test_moments_move_with_their_block_and_counts_go_on(optimizer, block):
    """At side 1 a moment of a block and a count have the same number of entries."""
    training = TrainingConfig(steps=1, optimizer=optimizer)
    spec = LinearSpec("block_sparse", "random", 0.25, block, max_fan_out=3.0)
    model = dataclasses.replace(MODEL, d_model=16, d_ff=32).with_linears(spec)
    state = initial_state(model, training)

    def filled(param, state):
        """Moments are copies of the weight, and counts sevens."""
        return state.with_arrays(
            np.array(param) if names == ("row", "column") else np.full_like(array, 7)
            for array, names in zip(state, state.names)
        )

    zeros = by_weight.init(model, training, state.params)
    states = by_weight.WeightStates(jax.tree.map(filled, state.params, zeros))
    moments = tuple(states if hasattr(m, "states") else m for m in state.moments)
    before = np.array(state.params["blocks"]["qkv"]["values"])
    after = update_layouts(
        state._replace(moments=moments), model, METHODS["set"].update, lambda _: 0.6
    )
    values = np.asarray(after.params["blocks"]["qkv"]["values"])
    assert values.shape == before.shape and not np.array_equal(values, before)
    # Drawn weights are not zero, and new ones are.
    assert 0.3 < np.mean(np.any(values != 0, (2, 3))) < 0.9
    moved = next(m for m in after.moments if hasattr(m, "states")).states["blocks"]["qkv"]["values"]
    assert ("row", "column") in moved.names
    for array, names in zip(moved, moved.names):
        expected = values if names == ("row", "column") else np.full(array.shape, 7)
        np.testing.assert_array_equal(array, expected)
