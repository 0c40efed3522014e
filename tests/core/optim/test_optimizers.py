"""The optimizer: schedule, decay mask, learning rates by density, equality with optax.adamw."""

import dataclasses
import functools
import math

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import some
from small_models import MIXED as MODEL
from small_models import shapes_of

from sparse_dataflow.core.config.model import SUPAR_HEAD, SUPAR_WIDTH, ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import BUILT_IN, TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.layouts.evolution import phase_specs
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.optim.optimizers import (
    TURNED_DENSE_RATE,
    adam_state,
    decay_mask,
    group_squares,
    learning_rate_multipliers,
    learning_rate_schedule,
    make_optimizer,
)
from sparse_dataflow.files.errors import UserError

SUPAR = dataclasses.replace(MODEL, parametrization="supar")
TRAINING = TrainingConfig(steps=20, batch=4, sequence=8, weight_decay=0.3, clip=0.7)


@functools.cache
def shapes(model=MODEL):
    return shapes_of(model)


def draw_like_params(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: scale * rng.normal(size=s.shape).astype(np.float32), shapes())


def by_path(tree):
    return {
        "/".join(key.key for key in path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


schedules = st.builds(
    TrainingConfig,
    steps=st.integers(1, 100),
    batch=st.just(1),
    sequence=st.just(1),
    learning_rate=st.sampled_from([1e-4, 1e-2]),
    warmup=st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.9, 0.99]),
    final_rate=st.sampled_from([0.0, 0.1, 0.5]),
)


@settings(max_examples=20)
@given(schedules)
def test_the_schedule_warms_up_then_falls_to_its_end(training):
    schedule = learning_rate_schedule(training)
    peak = training.learning_rate
    rates = [schedule(step) for step in range(training.steps + 1)]
    top = int(np.argmax(rates))
    assert abs(top - training.warmup * training.steps) <= 1
    assert rates[top] == pytest.approx(peak, rel=1e-6)
    assert rates[0] > 0
    if top > 1:
        np.testing.assert_allclose(np.diff(rates[: top + 1]), peak / (top + 1), rtol=1e-3)
    assert np.all(np.diff(rates[top:]) < 0)
    assert rates[-1] == pytest.approx(peak * training.final_rate, rel=1e-3, abs=1e-9)


def test_half_way_down_is_half_the_way():
    schedule = learning_rate_schedule(TrainingConfig(110, 1, 1, learning_rate=1.0, warmup=1 / 11))
    assert schedule(60) == pytest.approx((1 + 0.1) / 2, rel=1e-5)
    assert schedule(35) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, rel=1e-5)


def test_matrices_decay_and_nothing_else():
    decayed = {
        path for path, leaf in by_path(decay_mask(MODEL, draw_like_params(0))).items() if leaf
    }
    assert decayed == {
        "embed/tokens",
        "embed/positions",
        "blocks/qkv/values",
        "blocks/qkv/a_kernel",
        "blocks/qkv/b_kernel",
        "blocks/attn_out/kernel",
        "blocks/mlp_in/kernel",
        "blocks/mlp_out/values",
    }


def test_supar_gives_matrices_the_rate_of_their_width_and_density():
    params = draw_like_params(0)
    multipliers = by_path(learning_rate_multipliers(SUPAR, TRAINING, params))
    width = SUPAR_WIDTH / MODEL.d_model
    assert {path: m for path, m in multipliers.items() if m != 1} == {
        "blocks/qkv/values": width / 0.5,
        "blocks/qkv/a_kernel": width,
        "blocks/attn_out/kernel": width,
        "blocks/mlp_in/kernel": width,
        "blocks/mlp_out/values": width / 0.25,
    }


rates = st.floats(0.1, 10.0)


@given(rates, rates, st.sampled_from([MODEL, SUPAR]))
def test_each_kind_of_parameter_has_its_rate(sparse_rate, vector_rate, model):
    """Block-sparse weights: the full `sparse_rate` at density 1/8, a power of it in between."""
    training = dataclasses.replace(TRAINING, sparse_rate=sparse_rate, vector_rate=vector_rate)
    plain = by_path(learning_rate_multipliers(model, TRAINING, shapes()))
    multipliers = by_path(learning_rate_multipliers(model, training, shapes()))
    matrices = {
        "blocks/qkv/values": sparse_rate ** (1 / 3),
        "blocks/qkv/a_kernel": sparse_rate ** (1 / 3),
        "blocks/qkv/b_kernel": sparse_rate ** (1 / 3),
        "blocks/attn_out/kernel": 1.0,
        "blocks/mlp_in/kernel": 1.0,
        "blocks/mlp_out/values": sparse_rate ** (2 / 3),
    }
    for path, rate in multipliers.items():
        assert rate / plain[path] == pytest.approx(matrices.get(path, vector_rate))
    if model is MODEL:
        assert set(plain.values()) == {1.0}


@given(
    st.floats(1.5, 10.0),
    st.sampled_from([MODEL, SUPAR]),
    st.sampled_from([(), ("qkv",)]),
    st.sampled_from(BUILT_IN),
)
def test_weights_that_turned_dense_learn_faster_than_dense_ones(
    sparse_rate, model, first, optimizer
):
    training = dataclasses.replace(TRAINING, sparse_rate=sparse_rate, optimizer=optimizer)
    model = model.with_linears(MODEL.linear("mlp_out"), ["mlp_in"])
    sparse = weight_multipliers(model, training)
    dense = weight_multipliers(dataclasses.replace(model, linears=()), training)
    _, *later = phase_specs(model, EvolutionConfig("sparse_to_dense", first=first))
    for phase in later:
        for name, rate in weight_multipliers(phase.model, training).items():
            if name in phase.model.sparse_projections:
                assert rate == sparse[name] != dense[name]
            elif name in model.sparse_projections:
                assert rate == TURNED_DENSE_RATE[optimizer] * dense[name] != dense[name]
            else:
                assert rate == dense[name]
    assert not later[-1].model.sparse_projections


def weight_multipliers(model, training):
    """{projection: multiplier of its kernel or of its stored blocks}."""
    multipliers = by_path(learning_rate_multipliers(model, training, shapes(model))["blocks"])
    weights = ("/kernel", "/values")
    return {path.split("/")[0]: m for path, m in multipliers.items() if path.endswith(weights)}


def test_each_layer_has_the_rate_of_its_own_density():
    spec = LinearSpec("block_sparse", "cyclic", density=0.25, block=8)
    model = dataclasses.replace(SUPAR.with_linears(spec), density_by_depth=(2.0, 1.0))
    training = dataclasses.replace(TRAINING, sparse_rate=3.0)
    shapes = shapes_of(model)
    groups = learning_rate_multipliers(model, training, shapes)["blocks"]
    for group, density, power in zip(groups, (0.5, 0.25), (1 / 3, 2 / 3), strict=True):
        expected = 3.0**power * SUPAR_WIDTH / (model.d_model * density)
        for module in group.values():
            assert module.get("values", expected) == pytest.approx(expected)
    assert list(jax.eval_shape(group_squares, shapes)) == [
        *("blocks.attn_out", "blocks.mlp_in", "blocks.mlp_out", "blocks.norm1", "blocks.norm2"),
        *("blocks.qkv", "embed", "head"),
    ]


def test_the_square_of_a_group_is_the_sum_over_all_of_its_arrays():
    """A group is embed, head, or a projection in all layer groups."""
    ones = lambda *counts: {name: np.full(n, 2.0) for name, n in zip("abc", counts)}  # noqa: E731
    blocks = {"qkv": ones(1, 2), "norm1": ones(3)}, {"qkv": ones(4, 5)}
    tree = {"embed": ones(6, 7, 8), "blocks": blocks, "head": {"norm": ones(9, 1)}}
    expected = {"embed": 4 * 21, "blocks.qkv": 4 * 12, "blocks.norm1": 4 * 3, "head": 4 * 10}
    assert {name: float(s) for name, s in group_squares(tree).items()} == expected


@pytest.mark.parametrize("width", some([128, SUPAR_WIDTH], SUPAR_WIDTH))
def test_a_dense_model_of_the_base_width_is_the_same_under_supar(width):
    """The two parametrizations are equal at SUPAR_WIDTH only."""
    model = ModelConfig(1, width, width // SUPAR_HEAD, 2 * width, 40, 12)
    supar = dataclasses.replace(model, parametrization="supar")
    shapes = shapes_of(model)
    rates = set(by_path(learning_rate_multipliers(supar, TRAINING, shapes)).values())
    tokens = np.arange(12)[None]
    draw = jax.jit(lambda key: gpt.init(model, key))
    params = draw(jax.random.key(0))
    standard, scaled = (
        np.asarray(whole.logits(config, weights_of(config, params, {}), tokens))
        for config in (model, supar)
    )
    if width == SUPAR_WIDTH:
        assert rates == {1.0}
        np.testing.assert_array_equal(standard, scaled)
    else:
        assert rates == {1.0, SUPAR_WIDTH / width}
        np.testing.assert_allclose(scaled, standard * SUPAR_WIDTH / width, rtol=1e-4, atol=1e-5)


def train(optimizer, steps=4, scale=lambda updates: updates):
    """Returns the parameters after `steps` steps on random gradients, some above the clip."""
    params = draw_like_params(0)
    state = optimizer.init(params)
    update = jax.jit(functools.partial(optimizer.update, learning_rate=-1.0))
    for step in range(steps):
        gradients = draw_like_params(step + 1, scale=10.0 ** (step % 3 - 3))
        updates, state = update(gradients, state, params)
        params = jax.tree.map(np.add, params, scale(updates))
    return params


def test_without_supar_it_is_optax_adamw():
    rate = 0.01
    ours = train(
        make_optimizer(MODEL, TRAINING),
        scale=lambda updates: jax.tree.map(lambda u: -rate * u, updates),
    )
    theirs = train(
        optax.chain(
            optax.clip_by_global_norm(TRAINING.clip),
            optax.adamw(
                rate, b1=0.9, b2=0.95, weight_decay=0.3, mask=functools.partial(decay_mask, MODEL)
            ),
        )
    )
    for path, leaf in by_path(ours).items():
        np.testing.assert_allclose(leaf, by_path(theirs)[path], rtol=1e-5, atol=1e-6)


def test_gradients_are_clipped_to_their_global_norm():
    optimizer = make_optimizer(MODEL, dataclasses.replace(TRAINING, clip=1e-3))
    params = draw_like_params(0)
    state = optimizer.init(params)
    _, state = jax.jit(functools.partial(optimizer.update, learning_rate=-1.0))(
        draw_like_params(1, scale=50.0), state, params
    )
    assert optax.tree.norm(adam_state(state).mu) / (1 - 0.9) == pytest.approx(1e-3, rel=1e-4)


def test_supar_moves_weights_by_their_rates():
    params, gradients = draw_like_params(0), draw_like_params(1)
    moves = []
    for model in (MODEL, SUPAR):
        optimizer = make_optimizer(model, TRAINING)
        updates, _ = jax.jit(functools.partial(optimizer.update, learning_rate=-1.0))(
            gradients, optimizer.init(params), params
        )
        moves.append(by_path(updates))
    rates = by_path(learning_rate_multipliers(SUPAR, TRAINING, params))
    for path, standard in moves[0].items():
        factor = rates[path]
        np.testing.assert_allclose(moves[1][path], factor * standard, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"micro_batches": 3}, "training.batch=4 .* training.micro_batches=3 .* legal: 1, 2, 4"),
        ({"batch": 0}, "training.batch=0 is not legal: it must be from 1 to"),
        ({"warmup": 1.0}, r"training.warmup=1.0 is not legal: it must be in \[0, 1\)"),
        ({"sparse_rate": 0.0}, "training.sparse_rate=0.0 is not legal: it must be above 0"),
        ({"final_rate": 1.1}, r"training.final_rate=1.1 is not legal: it must be in \[0, 1\]"),
    ],
)
def test_illegal_training_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(TRAINING, **fields)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.5, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]),
        ("wsd", [0.5, 1, 1, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325]),
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_other_schedules_fall_as_their_names_say(schedule, expected):
    changes = {"linear": (10, 0.1), "wsd": (11, 0.1), "constant": (8, 0.1)}
    steps, final_rate = changes[schedule]
    training = TrainingConfig(
        steps, 1, 1, learning_rate=1.0, warmup=1 / steps, schedule=schedule, decay=4 / 11,
        final_rate=final_rate,
    )  # fmt: skip
    rates = [learning_rate_schedule(training)(step) for step in range(steps)]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)
