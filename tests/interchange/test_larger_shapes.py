"""A deeper or wider model begins with the function of the given weights, and its copies part."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_fixture import BYTES
from marks import some
from models import DENSE, DEPTH, SPARSE, TRAINING, begun, begun_with_equal_logits, export
from small_models import NEWER

from sparse_dataflow.commands.request import Request
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.optim.optimizers import adam_state, make_optimizer
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange.starting_point import refuse_other_model
from sparse_dataflow.interchange.width import head_sources
from sparse_dataflow.runs.families import FAMILIES

IDS = np.random.default_rng(0).integers(0, BYTES.vocab_size, (1, 8), np.int32)
SMALL = dataclasses.replace(DENSE, d_model=16, num_heads=2, d_ff=24)
LLAMA = dataclasses.replace(SMALL, **FAMILIES["llama"])
WIDE = {"d_model": 32, "num_heads": 4, "d_ff": 48}


VOCABULARY = {"vocab_size": BYTES.vocab_size}
GROUPED = dataclasses.replace(LLAMA, num_heads=4, num_kv_heads=2, head_dim=4)


@pytest.mark.parametrize(
    ("old", "fields"),
    some(
        {
            "gpt": (SMALL, {**WIDE, "num_layers": 3, "d_ff": 41}),
            "fused, supar, more groups": (
                dataclasses.replace(GROUPED, fused_qkv=True, parametrization="supar"),
                {"d_model": 48, "num_heads": 9, "num_kv_heads": 3},
            ),
            "tied, norms of heads, more queries": (
                dataclasses.replace(GROUPED, qk_norm=True, tied_embeddings=True, biases=("q", "k")),
                {"num_layers": 5, "d_model": 32, "num_heads": 6},
            ),
            "norms of all heads": (
                dataclasses.replace(GROUPED, **NEWER["olmo2"], parametrization="supar"),
                {"num_layers": 3, "d_model": 32, "num_heads": 8, "num_kv_heads": 4},
            ),
            "norms of each head, parallel": (
                dataclasses.replace(GROUPED, **NEWER["stablelm2_12b"]),
                {"num_layers": 3, "d_model": 48, "num_heads": 9, "num_kv_heads": 3},
            ),
            "biases of the output and of norms": (
                dataclasses.replace(SMALL, **NEWER["phi"] | VOCABULARY, post_norms=True),
                {"num_layers": 3, "d_model": 32, "num_heads": 4, "num_kv_heads": 4},
            ),
        },
        "fused, supar, more groups", "tied, norms of heads, more queries",
        "biases of the output and of norms",
    ),
)  # fmt: skip
def test_logits_are_those_of_the_smaller_model(old, fields):
    begun_with_equal_logits(old, dataclasses.replace(old, **fields), IDS)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5), st.integers(0, 3))
def test_a_copied_query_attends_to_a_copy_of_its_key(groups, queries, more_groups, more_queries):
    old = dataclasses.replace(SMALL, num_heads=groups * queries, num_kv_heads=groups, head_dim=4)
    groups, queries = groups + more_groups, queries + more_queries
    new = dataclasses.replace(old, num_heads=groups * queries, num_kv_heads=groups)
    copied_queries, copied_keys = head_sources(old, new)
    per_key = old.num_heads // old.kv_heads
    assert np.all(copied_queries // per_key == copied_keys[:, None])
    assert set(copied_queries.ravel()) == set(range(old.num_heads))


REPEATED = {"d_model": 64, "num_heads": 8, "d_ff": 128}


@pytest.mark.parametrize(
    ("old", "fields"),
    [
        (
            dataclasses.replace(DEPTH, parametrization="supar"),
            {"num_layers": 3, "density_by_depth": (2.0, 1.0, 1.0), **REPEATED},
        ),
        pytest.param(SPARSE, {"d_ff": 72, "linears": {}}, marks=pytest.mark.slow),
        pytest.param(
            DENSE,
            {"experts": 4, "top_k": 2, "shared_expert": True, **REPEATED},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dataclasses.replace(SPARSE, experts=2, top_k=2),
            {"num_layers": 3},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dataclasses.replace(DENSE, experts=2, top_k=1),
            {"num_layers": 3, **REPEATED},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["stored", "stored to dense", "to experts", "block-sparse experts", "dense experts"],
)
def test_stored_blocks_and_experts_grow(old, fields):
    state = begun_with_equal_logits(old, dataclasses.replace(old, **fields), IDS)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(adam_state(state.moments).mu))


@pytest.mark.slow
def test_the_first_loss_is_equal_and_three_steps_part_the_copies():
    new = dataclasses.replace(SMALL, num_layers=3, **WIDE)
    start, state = begun(SMALL, new)
    optimizer = make_optimizer(new, TRAINING)
    weights = np.ones((1, 7), np.float32)

    @jax.jit
    def step(params, moments):
        batch = Batch.from_windows(IDS, weights)
        compute = lambda params: whole.loss(new, weights_of(new, params, {}), batch)  # noqa: E731
        loss, gradients = jax.value_and_grad(compute)(params)
        rate = TRAINING.learning_rate
        updates, moments = optimizer.update(gradients, moments, params, learning_rate=rate)
        return loss, jax.tree.map(jnp.add, params, updates), moments

    params, moments, losses = state.params, state.moments, []
    for _ in range(3):
        loss, params, moments = step(params, moments)
        losses.append(float(loss))
    expected = jax.jit(
        lambda params: whole.loss(
            SMALL, weights_of(SMALL, params, {}), Batch.from_windows(IDS, weights)
        )
    )(start.params)
    np.testing.assert_allclose(losses[0], expected, rtol=1e-5)
    assert losses[0] > losses[1] > losses[2]

    # The two copies of a hidden feature begin with one function of the old features, except in the
    # new block, the last one.
    folded = [sum(np.split(np.asarray(p["blocks"]["mlp_in"]["kernel"]), 2, axis=1)) for p in
              (state.params, params)]  # fmt: skip
    before, after = (np.abs(np.subtract(*np.split(kernel, 2, axis=2))) for kernel in folded)
    assert before[:2].max() < 1e-6
    largest = after.max(axis=1)  # With equal shares they would all stay 0.
    assert np.all(largest > 10 * before[:2].max())
    assert np.quantile(largest[:2], 0.1) > 0.1 * TRAINING.learning_rate
    assert np.any(params["blocks"]["mlp_out"]["kernel"][2])  # The new block learns.


@pytest.mark.parametrize(
    ("old", "fields", "message"),
    [
        (SMALL, {"d_ff": 16}, r"model.d_ff is 24 .* and 16 in this run \(legal: 24 or more\)"),
        (SMALL, {"num_layers": 1}, r"model.num_layers is 2 .* \(legal: 2 or more\)"),
        (SMALL, {"d_model": 24, "head_dim": 8}, "d_model is 16 .* 24 .*legal: multiples of 16"),
        (SMALL, {"d_model": 32}, r"head is 8 .* 16 in this run \(legal: model.head_dim=8, or "
         r"model.num_heads=4\)"),
        (
            dataclasses.replace(SMALL, num_heads=6, num_kv_heads=2, head_dim=8),
            {"num_kv_heads": 3},
            "model.num_heads=6 with model.num_kv_heads=3 has no copy of some heads",
        ),
        (SPARSE, {"d_ff": 96}, "mlp_in is block-sparse .* cannot be repeated at these widths"),
        (
            dataclasses.replace(SPARSE, experts=2, top_k=2),
            {"d_ff": 128},
            "mlp_in of the experts is block-sparse .* legal: model.d_model=32 with model.d_ff=64",
        ),
        (
            dataclasses.replace(SMALL, window=4, layer_types="sliding+full"),
            {"num_layers": 3},
            r"new layers would move model.layer_types=sliding\+full \(legal: model.num_layers=2",
        ),
        (
            dataclasses.replace(SMALL, positions="rotary", rotary_layers="unrotated+rotated"),
            {"num_layers": 3},
            r"new layers would move model.rotary_layers=unrotated\+rotated",
        ),
        (
            dataclasses.replace(GROUPED, **NEWER["olmo2"]),
            {"d_model": 32, "num_heads": 6},
            "model.qk_norm_scope=all_heads averages over the heads",
        ),
        (
            dataclasses.replace(SMALL, scaled_embeddings=True),
            {"d_model": 32, "head_dim": 8},
            r"model.scaled_embeddings scales by the width \(legal: model.d_model=16\)",
        ),
        (SMALL, {"max_len": 32, "num_layers": 3}, "max_len is 16 .* and 32 in this run"),
    ],
)  # fmt: skip
def test_another_function_is_refused_in_words(old, fields, message):
    with pytest.raises(UserError, match=message):
        refuse_other_model(old, dataclasses.replace(old, **fields))
    with pytest.raises(UserError, match=message):
        begun(old, dataclasses.replace(old, **fields))


def test_the_command_line_names_the_larger_shape(tmp_path):
    old = dataclasses.replace(SPARSE, density_by_depth=(2.0, 1.0))
    export(tmp_path / "model", "sparse", old)
    changes = {"run.init_from": str(tmp_path / "model"), "model.num_layers": 4}
    config = Request(changes=changes).config()
    assert config.model.num_layers == 4
    assert config.sparsity.budget == "depth:2.0x,2.0x,1.0x,1.0x"


def test_a_layout_is_repeated():
    block = LinearSpec("block_sparse", "random", density=0.5, block=4)
    old = SMALL.with_linears(block, ("mlp_in",))
    start, state = begun(old, dataclasses.replace(old, **WIDE))
    assert start.params["blocks"]["mlp_in"]["layout"].in_index.shape[1:] == (6, 2)
    assert state.rest["blocks"]["mlp_in"]["layout"].in_index.shape[1:] == (12, 4)
