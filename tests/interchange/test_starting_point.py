"""A training begins with other weights: what is denser keeps its function, what is sparser its
largest blocks."""

import dataclasses

import jax
import numpy as np
import pytest

from sparse_dataflow.config.evolution import EvolutionConfig
from sparse_dataflow.config.model import LinearSpec, ModelConfig
from sparse_dataflow.config.training import TrainingConfig
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.starting_point import StartingPoint, begun_state
from sparse_dataflow.models import gpt
from sparse_dataflow.parallel import whole
from sparse_dataflow.sparsity.evolution import phase_specs

DENSE = ModelConfig(num_layers=2, d_model=32, num_heads=4, d_ff=64, vocab_size=40, max_len=16)
SPARSE = DENSE.with_linears(LinearSpec("block_sparse", "monarch", density=0.5, block=8))
TRAINING = TrainingConfig(steps=2, batch=2, sequence=8, learning_rate=1e-3)
NO_TOKENIZER = Tokenizer(tuple(chr(300 + n) for n in range(256)), (), 257)


def start_of(config):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: gpt.init(config, key), jax.random.key(0))
    params = jax.tree.map(lambda s: rng.normal(size=s.shape, scale=0.3).astype("f4"), shapes)
    return StartingPoint(config, params, gpt.layout_tables(gpt.layouts(config)), NO_TOKENIZER, {})


def logits(config, params, tables):
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8)
    return jax.jit(lambda params: whole.logits(config, params, tables, tokens))(params)


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_the_dense_model_begins_with_the_same_function(config):
    start = start_of(config)
    state = begun_state(start, DENSE, TRAINING)
    np.testing.assert_allclose(
        logits(DENSE, state.params, {}),
        logits(config, start.params, start.tables),
        rtol=1e-4,
        atol=1e-4,
    )
    assert int(state.step) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.moments))


def test_the_same_sparsity_keeps_every_bit():
    start = start_of(SPARSE)
    state = begun_state(start, SPARSE, TRAINING)
    same = jax.tree.map(np.array_equal, state.params, start.params)
    assert all(jax.tree.leaves(same))
    again = begun_state(start, SPARSE, TRAINING)  # What was given stays whole.
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, again.params, start.params)))


def test_the_largest_blocks_are_kept_and_balanced():
    start = start_of(DENSE)
    kernel = start.params["blocks"]["mlp_in"]["kernel"]
    grid = kernel.reshape(2, 4, 8, 8, 8)
    # The ring pattern of these blocks is the best balanced choice by far.
    for layer in range(2):
        for a in range(4):
            for b in (a, (a + 1) % 4):
                grid[layer, a, :, b] *= 10
                grid[layer, a, :, b + 4] *= 10
    state = begun_state(start, SPARSE, TRAINING)
    layouts = gpt.layouts_from_tables(SPARSE, state.tables)
    for layer, layout in enumerate(layouts["mlp_in"]):
        assert layout.balanced and layout.density == 0.5
        for a in range(4):
            assert {a, (a + 1) % 4} <= set(np.flatnonzero(layout.mask[a]) % 4)
        values = state.params["blocks"]["mlp_in"]["values"][layer]
        np.testing.assert_array_equal(values, layout.from_dense(kernel[layer]))


def test_given_layouts_are_data_of_the_programs():
    (phase,) = phase_specs(SPARSE, EvolutionConfig(given_layouts=True))
    assert phase.runtime_layouts
    (phase,) = phase_specs(DENSE, EvolutionConfig(given_layouts=True))
    assert not phase.runtime_layouts


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (dataclasses.replace(DENSE, d_model=64), "d_model is 32 there and 64 here"),
        (dataclasses.replace(DENSE, num_layers=3), "num_layers is 2 there and 3 here"),
        (dataclasses.replace(DENSE, norm="rmsnorm"), "norm is layernorm there and rmsnorm here"),
        (
            SPARSE.with_linears(LinearSpec("block_sparse", "monarch", 0.5, 4)),
            "qkv has blocks of 8 there, 4 here",
        ),
        (
            SPARSE.with_linears(LinearSpec("block_sparse", "cyclic", 0.75, 8)),
            "qkv has density 0.5 there and 0.75 here",
        ),
        (
            SPARSE.with_linears(LinearSpec("block_sparse", "monarch", 0.5, 8, hadamard=4)),
            "qkv has --set sparsity.hadamard=0 there and 4 here",
        ),
        (
            dataclasses.replace(SPARSE, density_by_depth=(0.5, 1.5)),
            "qkv of layer 2 has density 0.5 there and 0.75 here",
        ),
    ],
)
def test_what_does_not_fit_is_named(model, message):
    with pytest.raises(UserError, match=message):
        begun_state(start_of(SPARSE), model, TRAINING)
