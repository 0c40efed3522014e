"""Cuts of a training: what stays is fitted to the outputs before, and keeps its moments."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from eight_devices import on_eight_devices
from marks import some

from experiments.studies import study
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.layouts.evolution import phase_specs
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.optim.optimizers import adam_state, map_moments
from sparse_dataflow.core.training import hooks
from sparse_dataflow.core.training.loop import Trainer, advance_side_by_side
from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.core.training.programs import TrainingData, compile_programs
from sparse_dataflow.core.training.step import initial_state
from sparse_dataflow.core.training.transitions import change_model, host_masks
from sparse_dataflow.data.batches import EvalBatches, TrainBatches
from sparse_dataflow.monitoring.metrics import MetricsWriter
from sparse_dataflow.pruning import cuts
from sparse_dataflow.pruning.changes import change_of

MODEL = ModelConfig(2, 32, 4, 64, vocab_size=40, max_len=16)
TRAINING = TrainingConfig(steps=8, batch=4, sequence=16, learning_rate=1e-2)
MUON = dataclasses.replace(TRAINING, optimizer="muon")
GRADUAL = EvolutionConfig("gradual", at=0.6, prune_by="rebuild")
BLOCKS = LinearSpec("block_sparse", "random", density=0.25, block=8)
CASES = {
    "blocks": (BLOCKS, TRAINING),
    "blocks, muon": (BLOCKS, MUON),
    "hadamard": (dataclasses.replace(BLOCKS, hadamard=8), TRAINING),
    "single weights": (LinearSpec("masked", density=0.25, block=1), TRAINING),
    "rows of 16": (LinearSpec("masked", density=0.25, block=1, block_outputs=16), TRAINING),
}
TEXT = np.random.default_rng(0).zipf(1.5, 4000).clip(max=40).astype(np.uint16) - 1
WINDOWS = EvalBatches(TEXT[:200], 4, 16, 4)
DATA = TrainingData(TrainBatches(TEXT, 4, 16), WINDOWS, 199, WINDOWS, 199, "hash")
VARIANT = Variant("sparse", MODEL.with_linears(BLOCKS), TRAINING, GRADUAL)
BATCHES = [
    {"tokens": rows} for rows in np.random.default_rng(0).integers(0, 40, (6, 8, 17), np.int32)
]
OTHERS = np.random.default_rng(1).integers(0, 40, (8, 16), np.int32)


def drawn_state(model, training):
    """Returns a state with drawn parameters and moments, so that no two are equal."""
    rng = np.random.default_rng(0)

    def drawn(tree):
        draw = lambda leaf: jax.numpy.asarray(rng.normal(size=leaf.shape) / 4, leaf.dtype)  # noqa: E731
        return jax.tree.map(draw, tree)

    state = initial_state(model, training)
    return state._replace(params=drawn(state.params), moments=map_moments(drawn, state.moments))


def logits(model, state):
    rest = jax.tree.map(np.asarray, state.rest)
    return np.asarray(whole.logits(model, weights_of(state.params, rest), OTHERS))


def dense_moments(model, state, name):
    """Returns the first moments of a projection with zeros where it stores nothing."""
    module = adam_state(state.moments).mu["blocks"][name]
    if "kernel" in module:
        return np.asarray(module["kernel"])
    layouts = stacks.layouts_of(model, state.rest)[name]
    values = np.asarray(module["values"])
    return np.stack([layout.to_dense(each) for layout, each in zip(layouts, values)])


def stored(model, state, name):
    """Returns bool [layers, in, out] of a projection."""
    if model.linear(name).weight.has_mask:
        return host_masks(state.rest)[name]
    layouts = stacks.layouts_of(model, state.rest)[name]
    return np.stack([layout.to_dense(np.ones((layout.nnz, 8, 8), bool)) for layout in layouts])


@pytest.mark.parametrize(("spec", "training"), some(CASES, "blocks", "rows of 16"))
def test_each_cut_of_a_schedule_is_nearer_to_the_outputs_before_than_a_cut_by_norm(spec, training):
    models = [phase.model for phase in phase_specs(MODEL.with_linears(spec), GRADUAL)]
    state, change = drawn_state(models[0], training), cuts.fitted_change(6, 1)
    for old, new in itertools.pairwise(models):
        before = logits(old, state)
        moments = {name: dense_moments(old, state, name) for name in new.projections}
        was = {n: stored(old, state, n) for n in new.projections if old.linear(n).density < 1}
        copy = jax.tree.map(lambda leaf: leaf.copy(), (state.params, state.moments))
        plain = change_model(state._replace(params=copy[0], moments=copy[1]), old, new)
        state = change(state, old, new, BATCHES)
        fitted, cut = (np.linalg.norm(logits(new, each) - before) for each in (state, plain))
        assert fitted < 0.9 * cut
        shapes = lambda each: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), each)  # noqa: E731
        assert shapes(state) == shapes(plain)
        for name in new.projections:
            stays = stored(new, state, name)
            assert stays.mean() == new.linear(name).density
            assert name not in was or not (stays & ~was[name]).any()
            if not spec.hadamard:
                expected = np.where(stays, moments[name], 0)
                np.testing.assert_array_equal(dense_moments(new, state, name), expected)


def test_a_model_that_gets_no_sparser_is_changed_as_without_a_fit():
    sparse = MODEL.with_linears(BLOCKS)
    unread = map(lambda step: pytest.fail("reads batches"), [0])
    changes = cuts.fitted_change(1, 1), change_model
    states = [each(drawn_state(sparse, TRAINING), sparse, MODEL, unread) for each in changes]
    jax.tree.map(np.testing.assert_array_equal, states[0].params, states[1].params)


@pytest.mark.parametrize("stop", some([3, 4], 3))
def test_a_resumed_run_makes_the_same_cuts(tmp_path, stop):
    """Phases begin at steps 2 and 4 or so; a stop lies within a phase, and at its end."""
    programs = compile_programs(VARIANT.phase_specs, TRAINING, DATA, GRADUAL)
    fitted = change_of(GRADUAL, TRAINING, 2)

    def train(name, until=8, change=fitted):
        usual = hooks.usual(8, 4, change=change)
        t = Trainer(VARIANT, tmp_path / name, DATA, programs, usual, metrics=MetricsWriter)
        try:
            for _ in advance_side_by_side([t], lambda: t.step >= until):
                pass
        finally:
            t.close()
        return jax.device_get((t.state.params, t.state.rest))

    whole_run = train("whole")
    train("cut", stop)
    jax.tree.map(np.testing.assert_array_equal, train("cut"), whole_run)
    by_norm = train("norm", change=change_model)
    assert any(
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(whole_run), jax.tree.leaves(by_norm))
    )


def test_a_fit_reads_its_rows_of_batches_on_a_mesh():
    equal = on_eight_devices("pruning/placed_batches.py")
    assert equal and all(equal.values())


@pytest.mark.slow
def test_a_study_fits_its_cuts(tmp_path):
    programs, losses = {}, []
    for prune_by in ("rebuild", "weights"):
        evolution = dataclasses.replace(GRADUAL, prune_by=prune_by)
        variant, folder = dataclasses.replace(VARIANT, evolution=evolution), tmp_path / prune_by
        result = study.train("cut", variant, DATA, folder, lambda: False, compiled=programs)
        losses.append(result["loss"])
    assert losses[0] != losses[1]
