"""Models for the tests of import and export, and a helper that changes saved weights."""

import dataclasses

import jax
import numpy as np
from make_fixture import BYTES
from safetensors.numpy import load_file, save_file

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model import gpt, stacks
from sparse_dataflow.core.model.model_weights import ModelWeights, weights_of
from sparse_dataflow.interchange import huggingface
from sparse_dataflow.interchange.starting_point import StartingPoint, initial_state_from

DENSE = ModelConfig(
    num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=BYTES.vocab_size, max_len=16
)
SPARSE = DENSE.with_linears(LinearSpec("block_sparse", "monarch", density=0.5, block=8))
SUPAR = dataclasses.replace(SPARSE, parametrization="supar")
LOW_RANK = SPARSE.with_linears(
    LinearSpec("block_sparse", "random", 0.25, 8, rank=3, hadamard=4), ("mlp_in",)
)
DEPTH = dataclasses.replace(LOW_RANK, density_by_depth=(2.0, 1.0))
TRAINING = TrainingConfig(steps=2, batch=2, sequence=8, learning_rate=1e-3)


def random_model(config, seed=0):
    """Returns (random nonzero parameters, layout tables)."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: gpt.init(config, key), jax.random.key(0))
    params = jax.tree.map(lambda s: rng.normal(size=s.shape, scale=0.3).astype("f4"), shapes)
    return params, stacks.layout_tables(stacks.layouts(config))


def logits(config, params, tables, ids):
    run = jax.jit(lambda params, ids: whole.logits(config, weights_of(params, tables), ids))
    return np.asarray(run(params, ids))


def begun(old, new, seed=0):
    """Returns (parameters and tables of a random model, state of the new model at step 0)."""
    start = StartingPoint(old, *random_model(old, seed), BYTES, {})
    return start, initial_state_from(start, new, TRAINING)


def begun_with_equal_logits(old, new, ids):
    """Checks that a new model begins with the logits of the old one; returns its state."""
    start, state = begun(old, new)
    expected = logits(old, start.params, start.tables, ids)
    actual = logits(new, state.params, state.tables, ids)
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
