"""Models for the tests of import and export, and a helper that changes saved weights."""

import dataclasses

import jax
import numpy as np
import small_models
from make_fixture import BYTES
from safetensors.numpy import load_file, save_file
from small_models import arbitrary_params, tables_of

from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model.adapters import merged
from sparse_dataflow.core.model.stacks import ModelWeights, weights_of
from sparse_dataflow.interchange import huggingface
from sparse_dataflow.interchange.starting_point import StartingPoint, initial_state_from

DENSE, SPARSE, LOW_RANK = (
    dataclasses.replace(config, vocab_size=BYTES.vocab_size)
    for config in (small_models.DENSE, small_models.SPARSE, small_models.LOW_RANK)
)
SUPAR = dataclasses.replace(SPARSE, parametrization="supar")
DEPTH = dataclasses.replace(LOW_RANK, density_by_depth=(2.0, 1.0))
TRAINING = TrainingConfig(steps=2, batch=2, sequence=8, learning_rate=1e-3)


def random_model(config, seed=0):
    """Returns (random nonzero parameters, layout tables)."""
    return arbitrary_params(config, seed, 0.3), tables_of(config)


def logits(config, params, tables, ids):
    run = jax.jit(lambda params, ids: whole.logits(config, weights_of(params, tables), ids))
    return np.asarray(run(params, ids))


def begun(old, new, seed=0):
    """Returns (parameters and tables of a random model, state of the new model at step 0)."""
    start = StartingPoint(old, merged(*random_model(old, seed)), BYTES, {})
    return start, initial_state_from(start, new, TRAINING)


def begun_with_equal_logits(old, new, ids):
    """Checks that a new model begins with the logits of the old one; returns its state."""
    start, state = begun(old, new)
    expected = logits(old, start.params, (), ids)
    actual = logits(new, state.params, state.rest, ids)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    assert int(state.step) == 0
    return state


def export(folder, form, config, seed=0):
    """Exports a random model and returns its (parameters, layout tables)."""
    params, tables = random_model(config, seed)
    weights = ModelWeights(params, tables)
    huggingface.write(
        folder, form, config, weights, BYTES, context=config.max_len, card="# A model\n"
    )
    return params, tables


def change_tensors(folder, change):
    """Applies `change` to the dict of the folder's tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
