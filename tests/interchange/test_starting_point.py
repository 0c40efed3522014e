"""Initial weights: denser projections compute the same function, sparser ones keep the largest
blocks."""

import dataclasses

import jax
import numpy as np
import pytest
from models import logits, random_model
from small_models import DENSE, SPARSE

from sparse_dataflow.core.config.layer_groups import split_groups
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.layouts.evolution import phase_specs
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.model.partition import merged
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.starting_point import StartingPoint, initial_state_from
from sparse_dataflow.runs.families import FAMILIES

TRAINING = TrainingConfig(steps=2, batch=2, sequence=8, learning_rate=1e-3)
NO_TOKENIZER = Tokenizer(tuple(chr(300 + n) for n in range(256)), (), 257)


TOKENS = np.arange(16, dtype=np.int32).reshape(2, 8)


def start_of(config):
    return StartingPoint(config, merged(*random_model(config)), NO_TOKENIZER, {})


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_the_dense_model_starts_with_the_same_function(config):
    start = start_of(config)
    state = initial_state_from(start, DENSE, TRAINING)
    np.testing.assert_allclose(
        logits(DENSE, state.params, {}, TOKENS),
        logits(config, start.params, (), TOKENS),
        rtol=1e-4,
        atol=1e-4,
    )
    assert int(state.step) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.moments))


def test_the_same_sparsity_keeps_every_bit():
    start = start_of(SPARSE)
    state = initial_state_from(start, SPARSE, TRAINING)
    same = jax.tree.map(np.array_equal, state.merged, start.params)
    assert all(jax.tree.leaves(same))
    again = initial_state_from(start, SPARSE, TRAINING)  # `start` is not modified.
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, again.merged, start.params)))


def test_low_rank_terms_join_given_weights_and_keep_their_function():
    spec = LinearSpec("block_sparse", "monarch", density=0.5, block=8, rank=4)
    start, low_rank = start_of(SPARSE), DENSE.with_linears(spec)
    state = initial_state_from(start, low_rank, TRAINING)
    expected = logits(SPARSE, start.params, (), TOKENS)
    result = logits(low_rank, state.params, state.rest, TOKENS)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert split_groups(state.params["blocks"])[0]["qkv"].keys() > {"values"}


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
    state = initial_state_from(start, SPARSE, TRAINING)
    layouts = stacks.layouts_of(SPARSE, state.rest)
    for layer, layout in enumerate(layouts["mlp_in"]):
        assert layout.balanced and layout.density == 0.5
        for a in range(4):
            assert {a, (a + 1) % 4} <= set(np.flatnonzero(layout.mask[a]) % 4)
        values = state.params["blocks"]["mlp_in"]["values"][layer]
        np.testing.assert_array_equal(values, layout.from_dense(kernel[layer]))


def test_a_shape_that_no_layout_divides_is_named_with_the_legal_values():
    """Two blocks of keys have only densities 1/2 and 1."""
    llama = dataclasses.replace(DENSE, **FAMILIES["llama"], num_kv_heads=2)
    after = llama.with_linears(LinearSpec("block_sparse", "random", 0.25, 8))
    with pytest.raises(UserError, match=r"^k: Density 0.25 has no .* legal: multiples of 1/2.*den"):
        initial_state_from(start_of(llama), after, TRAINING)
    after = llama.with_linears(LinearSpec("block_sparse", "random", 0.5, 5))
    with pytest.raises(UserError, match=r"^q: Block 5 does not divide a 32 x 32 .* legal blocks"):
        initial_state_from(start_of(llama), after, TRAINING)


@pytest.mark.parametrize("start", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_layouts_that_rigl_will_change_get_wide_tables(start):
    (phase,) = phase_specs(SPARSE, EvolutionConfig("rigl", given_layouts=True))
    state = initial_state_from(start_of(start), phase.model, TRAINING)
    expected = stacks.stored_layouts(phase.model)
    assert jax.tree.map(np.shape, state.rest) == jax.tree.map(np.shape, expected)


def test_given_layouts_are_runtime_data():
    (phase,) = phase_specs(SPARSE, EvolutionConfig(given_layouts=True))
    assert phase.runtime_layouts
    (phase,) = phase_specs(DENSE, EvolutionConfig(given_layouts=True))
    assert not phase.runtime_layouts


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            dataclasses.replace(DENSE, max_len=32),
            "max_len is 16 in the initial weights and 32 in this run",
        ),
        (
            dataclasses.replace(DENSE, norm="rmsnorm"),
            "norm is layernorm in the initial weights and rmsnorm in",
        ),
        (
            SPARSE.with_linears(LinearSpec("block_sparse", "monarch", 0.5, 4)),
            "qkv: block size is 8 in the initial weights and 4 in this run",
        ),
        (
            SPARSE.with_linears(LinearSpec("block_sparse", "cyclic", 0.75, 8)),
            "qkv: density is 0.5 in the initial weights and 0.75 in this run",
        ),
        (
            SPARSE.with_linears(LinearSpec("block_sparse", "monarch", 0.5, 8, hadamard=4)),
            "qkv: --set sparsity.hadamard is 0 in the initial weights and 4 in this run",
        ),
        (
            dataclasses.replace(SPARSE, density_by_depth=(0.5, 1.5)),
            "qkv of layer 2: density is 0.5 in the initial weights and 0.75 in this run",
        ),
    ],
)
def test_a_mismatch_is_named(model, message):
    with pytest.raises(UserError, match=message):
        initial_state_from(start_of(SPARSE), model, TRAINING)


def test_a_static_run_refuses_layouts_that_rigl_changed():
    wide = SPARSE.with_linears(LinearSpec("block_sparse", "monarch", 0.5, 8, max_fan_out=1.5))
    with pytest.raises(UserError, match=r"qkv: evolution.max_fan_out is 1.5 .* and 1.0 in this"):
        initial_state_from(start_of(wide), SPARSE, TRAINING)
