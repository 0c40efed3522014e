"""Transitions between layouts and models: blocks that stay keep their bits, and some transitions
keep the function."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
import scipy.linalg
from marks import some

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.layouts.evolution import METHODS, phase_specs
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.optim.optimizers import (
    TrainState,
    adam_state,
    make_optimizer,
    map_moments,
)
from sparse_dataflow.core.training.step import initial_state
from sparse_dataflow.core.training.transitions import change_model, update_layouts
from sparse_dataflow.runs.run_config import SIZES

PROJECTIONS = SIZES["nano"].projections

SPARSE = LinearSpec("block_sparse", "cyclic", density=0.25, block=8)
MODEL = ModelConfig(2, 64, 4, 128, vocab_size=40, max_len=8).with_linears(SPARSE)
RANKED = MODEL.with_linears(dataclasses.replace(SPARSE, rank=3))
MIXED = MODEL.with_linears(dataclasses.replace(SPARSE, hadamard=16))
TRAINING = TrainingConfig(steps=9, batch=2, sequence=8)
MUON = dataclasses.replace(TRAINING, optimizer="muon")
TOKENS = np.random.default_rng(1).integers(0, 40, (2, 8), np.int32)


def trained_state(model, seed=0, training=TRAINING) -> TrainState:
    """Returns a state with random parameters and moments, so that no two are equal."""
    rng = np.random.default_rng(seed)

    def draw(tree):
        return jax.tree.map(
            lambda leaf: jax.numpy.asarray(0.1 * rng.normal(size=leaf.shape), leaf.dtype), tree
        )

    state = initial_state(model, training)
    params, moments = draw(state.params), map_moments(draw, state.moments)
    return state._replace(params=params, moments=moments, step=jax.numpy.int32(5))


def to_numpy(state):
    return jax.tree.map(
        lambda leaf: np.array(
            jax.random.key_data(leaf)
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        ),
        state,
    )


def evolving(model, method):
    """Returns the model with tables as wide as the method needs."""
    (phase,) = phase_specs(model, EvolutionConfig(method))
    return phase.model


def trees(state):
    adam = adam_state(state.moments)
    return state.params, adam.mu, adam.nu


def logits_of(model, state):
    tables = jax.tree.map(np.asarray, state.rest)
    return np.asarray(
        jax.jit(lambda p: whole.logits(model, weights_of(model, p, tables), TOKENS))(state.params)
    )


def assert_shaped_like(state, model, training=TRAINING):
    """Asserts that the optimizer of `model` accepts the state: same tree, shapes and dtypes."""
    expected = jax.eval_shape(lambda: initial_state(model, training))
    describe = lambda leaf: (leaf.shape, leaf.dtype)  # noqa: E731
    assert jax.tree.map(describe, state) == jax.tree.map(describe, expected)
    optimizer = make_optimizer(model, training)
    update = functools.partial(optimizer.update, learning_rate=-1.0)
    jax.eval_shape(update, state.params, state.moments, state.params)


@pytest.mark.parametrize("method", ["set", "rigl"])
@pytest.mark.parametrize("model", [MODEL, RANKED], ids=["plain", "ranked"])
def test_an_update_keeps_old_blocks_bit_by_bit_and_starts_new_ones_at_zero(method, model):
    model = evolving(model, method)
    before = to_numpy(trained_state(model))
    rng = np.random.default_rng(0)
    gradients = {
        name: rng.random((2, *layers[0].mask.shape))
        for name, layers in model_layouts.layouts(model).items()
    }
    update = METHODS[method].update
    after = update_layouts(trained_state(model), model, update, lambda _: 0.3, gradients)
    assert_shaped_like(after, model)
    old, new = (stacks.layouts_of(model, s.rest) for s in (before, after))
    for name in PROJECTIONS:
        for layer in range(2):
            was, now = old[name][layer], new[name][layer]
            np.testing.assert_array_equal(now.fan_in, was.fan_in)
            assert now != was
            assert (was.mask & now.mask).sum() >= round(0.7 * was.nnz)
            for theirs, mine in zip(trees(before), trees(after)):
                dense = was.to_dense(theirs["blocks"][name]["values"][layer])
                expected = now.from_dense(dense)
                values = np.asarray(mine["blocks"][name]["values"][layer])
                assert values.tobytes() == expected.astype(values.dtype).tobytes()
    again = update_layouts(trained_state(model), model, update, lambda _: 0.3, gradients)
    jax.tree.map(np.testing.assert_array_equal, to_numpy(again), to_numpy(after))
    on_host = to_numpy(trained_state(model))._replace(key=trained_state(model).key)
    on_host = update_layouts(on_host, model, update, lambda _: 0.3, gradients)
    jax.tree.map(np.testing.assert_array_equal, to_numpy(on_host), to_numpy(after))
    others = [
        t for t in jax.tree_util.tree_leaves_with_path(before.params) if "values" not in str(t)
    ]
    params = dict(jax.tree_util.tree_leaves_with_path(after.params))
    assert all(np.array_equal(params[path], leaf) for path, leaf in others)


def test_random_choices_follow_from_key_and_step():
    update, model = METHODS["set"].update, evolving(MODEL, "set")
    layouts = []
    for change in ({}, {"step": jax.numpy.int32(6)}, {"key": jax.random.key(3)}):
        state = update_layouts(
            trained_state(model)._replace(**change), model, update, lambda _: 0.3
        )
        layouts.append(stacks.layouts_of(model, state.rest)["mlp_in"])
    assert layouts[0] != layouts[1] and layouts[0] != layouts[2]


@pytest.mark.parametrize("model", some({"plain": (MODEL,), "ranked": (RANKED,)}, "ranked"))
def test_dense_is_the_same_function_with_the_same_moments(model):
    dense = phase_specs(model, EvolutionConfig("sparse_to_dense"))[1].model
    before = trained_state(model)
    logits, original = logits_of(model, before), to_numpy(before)
    after = change_model(before, model, dense)
    assert_shaped_like(after, dense)
    np.testing.assert_allclose(logits_of(dense, after), logits, rtol=1e-5, atol=1e-5)
    assert np.abs(logits).max() > 0.1
    for name, layers in model_layouts.layouts(model).items():
        for layer, layout in enumerate(layers):
            for tree, (theirs, mine) in enumerate(zip(trees(original), trees(after))):
                module = jax.tree.map(lambda leaf, i=layer: leaf[i], theirs["blocks"][name])
                kernel = mine["blocks"][name]["kernel"][layer]
                expected = layout.to_dense(module["values"])
                if tree == 0 and "gate" in module:
                    expected += module["gate"] * module["a_kernel"] @ module["b_kernel"]
                    np.testing.assert_allclose(kernel, expected, rtol=1e-5, atol=1e-6)
                else:
                    np.testing.assert_array_equal(kernel, expected)


def test_a_weight_with_a_hadamard_transform_becomes_a_dense_one_of_the_same_function():
    dense = phase_specs(MIXED, EvolutionConfig("sparse_to_dense"))[1].model
    before = trained_state(MIXED)
    logits, original = logits_of(MIXED, before), to_numpy(before)
    after = change_model(before, MIXED, dense)
    assert_shaped_like(after, dense)
    np.testing.assert_allclose(logits_of(dense, after), logits, rtol=1e-5, atol=1e-5)
    for name, layers in model_layouts.layouts(MIXED).items():
        inside = MIXED.projection_shape(name)[0]
        turn = np.kron(np.eye(inside // 16), scipy.linalg.hadamard(16) / 4)
        # Variances of independent gradients transform with the squares.
        for tree, step in zip(range(3), (turn, turn, np.square(turn))):
            theirs, mine = trees(original)[tree], trees(after)[tree]
            expected = step @ layers[1].to_dense(theirs["blocks"][name]["values"][1])
            kernel = mine["blocks"][name]["kernel"][1]
            np.testing.assert_allclose(kernel, expected, rtol=1e-4, atol=1e-6)


def test_pruning_with_a_transform_keeps_the_largest_blocks_of_the_transformed_weight():
    dense = MODEL.with_linears(LinearSpec())
    state = trained_state(dense)
    kernel = np.array(state.params["blocks"]["mlp_out"]["kernel"][0])
    after = change_model(state, dense, MIXED)
    assert_shaped_like(after, MIXED)
    layout = stacks.layouts_of(MIXED, after.rest)["mlp_out"][0]
    turned = np.kron(np.eye(len(kernel) // 16), scipy.linalg.hadamard(16) / 4) @ kernel
    values = after.params["blocks"]["mlp_out"]["values"][0]
    np.testing.assert_allclose(values, layout.from_dense(turned), rtol=1e-4, atol=1e-6)
    plain = stacks.layouts_of(MODEL, change_model(trained_state(dense), dense, MODEL).rest)
    assert layout != plain["mlp_out"][0]


def test_a_new_low_rank_term_keeps_the_function():
    before = trained_state(MODEL)
    logits = logits_of(MODEL, before)
    after = change_model(before, MODEL, RANKED)
    assert_shaped_like(after, RANKED)
    np.testing.assert_allclose(logits_of(RANKED, after), logits, rtol=1e-5, atol=1e-6)
    for name in PROJECTIONS:
        module = after.params["blocks"][name]
        assert np.std(module["a_kernel"]) > 0.05 and not np.any(module["b_kernel"])
        assert not any(np.any(tree["blocks"][name]["a_kernel"]) for tree in trees(after)[1:])


def test_pruning_keeps_the_largest_blocks_of_all_stages():
    models = phase_specs(MODEL, EvolutionConfig("gradual"))
    state = trained_state(models[0].model)
    original = to_numpy(state)
    energy, stored = [], None
    for before, after in itertools.pairwise(models):
        state = change_model(state, before.model, after.model)
        assert_shaped_like(state, after.model)
        layout = stacks.layouts_of(after.model, state.rest)["mlp_in"][1]
        assert layout.balanced and layout.density == after.model.linear("mlp_in").density
        assert stored is None or stored.mask[layout.mask].all()
        stored = layout
        for theirs, mine in zip(trees(original), trees(state)):
            expected = layout.from_dense(theirs["blocks"]["mlp_in"]["kernel"][1])
            np.testing.assert_array_equal(mine["blocks"]["mlp_in"]["values"][1], expected)
        kernel = original.params["blocks"]["mlp_in"]["kernel"][1]
        energy.append(np.sum(expected**2) / np.sum(kernel**2) / layout.density)
    assert len(energy) == 2 and np.sum(layout.from_dense(kernel) ** 2) > np.sum(kernel**2) / 4


def test_converted_arrays_are_freed():
    """So that the extra memory is one array of one projection."""
    state = trained_state(MODEL)
    values = [tree["blocks"]["qkv"]["values"] for tree in trees(state)]
    update_layouts(state, MODEL, METHODS["set"].update, lambda _: 0.3)
    assert all(leaf.is_deleted() for leaf in values)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (RANKED, phase_specs(RANKED, EvolutionConfig("sparse_to_dense"))[1].model),
        (MIXED, phase_specs(MIXED, EvolutionConfig("sparse_to_dense"))[1].model),
        (dataclasses.replace(MODEL, linears=()), MIXED),
        (MODEL, RANKED),
    ],
    ids=["merge low rank", "merge transform", "prune", "add low rank"],
)
def test_muon_momentum_changes_as_the_first_moment_of_adam(old, new):
    adamw, muon = (change_model(trained_state(old, training=t), old, new) for t in (TRAINING, MUON))
    assert_shaped_like(muon, new, MUON)
    for mine, theirs in zip(trees(muon)[:2], trees(adamw)[:2]):
        jax.tree.map(np.testing.assert_array_equal, mine, theirs)


def test_muon_momentum_follows_its_blocks():
    update = METHODS["set"].update
    adamw, muon = (
        update_layouts(trained_state(MODEL, training=t), MODEL, update, lambda _: 0.3)
        for t in (TRAINING, MUON)
    )
    assert_shaped_like(muon, MODEL, MUON)
    jax.tree.map(np.testing.assert_array_equal, trees(muon)[1], trees(adamw)[1])


@pytest.mark.parametrize("training", some({"adamw": TRAINING, "muon": MUON}, "muon"))
def test_copies_of_a_shared_block_keep_the_loss_and_the_direction_of_the_moments(training):
    """The copies have the logits of the shared block, and without a gradient they move as it."""
    spec = LinearSpec("block_sparse", "monarch", density=0.25, block=8, rank=2)
    own = dataclasses.replace(MODEL, linears={"qkv": spec})
    shared = dataclasses.replace(own, shared_layers=True)
    state = trained_state(shared, training=training)
    state = state._replace(
        moments=map_moments(lambda t: t, state.moments, lambda t: jax.tree.map(abs, t))
    )
    before, logits = to_numpy(state), logits_of(shared, state)
    after = change_model(state, shared, own)
    assert_shaped_like(after, own, training)
    np.testing.assert_allclose(logits_of(own, after), logits, rtol=1e-5, atol=1e-5)

    def step_without_gradient(model, state):
        zeros = jax.tree.map(jax.numpy.zeros_like, state.params)
        update = jax.jit(make_optimizer(model, training).update)
        return update(zeros, state.moments, state.params, learning_rate=1.0)[0]["blocks"]

    mine, theirs = (step_without_gradient(m, s) for m, s in ((own, after), (shared, before)))
    for copies, block in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(copies, np.repeat(block, 2, 0), rtol=1e-3, atol=1e-5)
