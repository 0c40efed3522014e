"""Transitions with per-layer density convert each layer as with one density for all layers."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import some
from test_transitions import assert_shaped_like, logits_of, trained_state, trees

from sparse_dataflow.core.config.layer_groups import layer_groups, layer_linear
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.layouts.evolution import METHODS, phase_specs
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.optim.optimizers import map_moments
from sparse_dataflow.core.training.transitions import change_model, update_layouts

SPARSE = LinearSpec("block_sparse", "cyclic", density=0.25, block=8, rank=2, hadamard=16)
DENSE = ModelConfig(3, 64, 4, 128, vocab_size=40, max_len=8).with_linears(LinearSpec(rank=2))
ALIKE = DENSE.with_linears(SPARSE)
BY_DEPTH = dataclasses.replace(ALIKE, density_by_depth=(2.0, 1.0, 1.0))
FIRST = EvolutionConfig("sparse_to_dense", first=("mlp_in", "mlp_out"))
CHANGES = {
    "sparse_to_dense": lambda model: staged(model, EvolutionConfig("sparse_to_dense"))[:2],
    "mlp_dense_first": lambda model: staged(model, FIRST)[:2],
    "then_all": lambda model: staged(model, FIRST)[1:],
    "from_dense": lambda model: (DENSE, model),
    "from_denser": lambda model: (
        DENSE.with_linears(dataclasses.replace(SPARSE, density=0.75)),
        model,
    ),
    "to_alike": lambda model: (model, ALIKE),
}
RNG = np.random.default_rng(0)
NORMS = {
    name: RNG.random((3, *layouts[0].mask.shape))
    for name, layouts in model_layouts.layouts(ALIKE).items()
}


def staged(model, evolution):
    return [phase.model for phase in phase_specs(model, evolution)]


def updated(method):
    update = METHODS[method].update

    def transition_of(model):
        (model,) = staged(model, EvolutionConfig(method))
        return model, model, lambda s: update_layouts(s, model, update, lambda _: 0.3, NORMS)

    return transition_of


def transition(name, model):
    """(model before, model after, state -> state)."""
    if name in ("set", "rigl"):
        return updated(name)(model)
    before, after = CHANGES[name](model)
    return before, after, lambda state: change_model(state, before, after)


def state_of_layers(states, model):
    """Returns a state of `model` whose layer i has the leaves of layer i of states[i]."""

    def combine(*each):
        layers = [
            jax.tree.map(np.asarray, list(stacks.layers(tree["blocks"]))[i])
            for i, tree in enumerate(each)
        ]
        blocks = jax.tree.map(jnp.array, stacks.stacked_layers(model, layers))
        return jax.tree.map(jnp.array, {**each[0], "blocks": blocks})

    params, mu, nu = (combine(*each) for each in zip(*map(trees, states)))
    moments = map_moments(lambda _: mu, states[0].moments, second=lambda _: nu)
    tables = stacks.stored_layouts(model)
    return states[0]._replace(params=params, moments=moments, rest=tables)


@pytest.mark.parametrize("name", some(["set", "rigl", *CHANGES], "rigl", "from_denser"))
def test_every_layer_is_converted_as_among_equal_layers(name):
    before, after, change = transition(name, BY_DEPTH)
    initial, expected = [], []
    for group in layer_groups(BY_DEPTH):
        model, _, change_group = transition(name, group.model)
        initial += [trained_state(model)] * len(group.layers)
        expected += [change_group(trained_state(model))] * len(group.layers)
    state = change(state_of_layers(initial, before))
    assert_shaped_like(state, after)
    for mine, theirs in zip(trees(state), zip(*map(trees, expected))):
        layers = list(stacks.layers(mine["blocks"]))
        assert len(layers) == 3
        for i, layer in enumerate(layers):
            twin = list(stacks.layers(theirs[i]["blocks"]))[i]
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), layer, twin)
    assert np.asarray(state.step) == 5


@pytest.mark.parametrize("name", some(["sparse_to_dense", "mlp_dense_first"], "mlp_dense_first"))
def test_the_function_is_unchanged(name):
    before, after, change = transition(name, BY_DEPTH)
    state = trained_state(before)
    logits = logits_of(before, state)
    changed = logits_of(after, change(state))
    assert np.abs(logits).max() > 0.1
    np.testing.assert_allclose(changed, logits, rtol=1e-4, atol=1e-5)


def test_pruning_keeps_the_largest_blocks_of_every_layer():
    plain = dataclasses.replace(SPARSE, rank=0, hadamard=0)
    models = phase_specs(BY_DEPTH.with_linears(plain), EvolutionConfig("gradual"))
    assert [len(layer_groups(phase.model)) for phase in models] == [1, 2, 2]
    state = trained_state(models[0].model)
    original = [np.array(tree["blocks"]["mlp_in"]["kernel"]) for tree in trees(state)]
    before = None
    for last, phase in itertools.pairwise(models):
        state = change_model(state, last.model, phase.model)
        assert_shaped_like(state, phase.model)
        layouts = stacks.layouts_of(phase.model, state.rest)["mlp_in"]
        for i, layout in enumerate(layouts):
            assert layout.density == layer_linear(phase.model, "mlp_in", i).density
            assert layout.balanced and (before is None or before[i].mask[layout.mask].all())
        before = layouts
        for kernels, tree in zip(original, trees(state)):
            for i, layer in enumerate(stacks.layers(tree["blocks"])):
                expected = layouts[i].from_dense(kernels[i])
                np.testing.assert_array_equal(layer["mlp_in"]["values"], expected)
