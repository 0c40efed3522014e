"""Hidden features that are left out of a phase, and put back."""

import dataclasses
import functools

import evolving
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import examples

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.executors.block_gradients import Portions
from sparse_dataflow.core.layouts.evolution import phase_specs
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.model.left_out import LEFT_OUT
from sparse_dataflow.core.optim.optimizers import adam_state, learning_rate_schedule
from sparse_dataflow.core.training import cost, loop
from sparse_dataflow.core.training.phases import (
    mean_flops_per_token,
    phases,
    refuse_unfit,
    run_flops,
)
from sparse_dataflow.core.training.saved_state import identity
from sparse_dataflow.core.training.step import abstract_state, initial_state
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.monitoring.metrics import read_metrics
from sparse_dataflow.pruning import omission

MODEL = ModelConfig(2, 16, 2, 48, vocab_size=40, max_len=8)
GATED = dataclasses.replace(
    MODEL, gated_mlp=True, activation="silu", biases=(), norm="rmsnorm", d_ff=32, num_layers=3
)
SPARSE = dataclasses.replace(MODEL, density_by_depth=(2.0, 1.0)).with_linears(
    LinearSpec("block_sparse", "monarch", 0.25, 4), ["qkv", "attn_out"]
)
TRAINING = TrainingConfig(20, batch=4, sequence=8, learning_rate=3e-2)
EVOLUTION = EvolutionConfig("omit_features", at=0.9)
TOKENS = np.arange(36).reshape(4, 9) * 7 % 40


def filled(model, optimizer="adamw"):
    """A state whose moments are no zeros."""
    state = initial_state(model, dataclasses.replace(TRAINING, optimizer=optimizer))
    numbers = lambda x: x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)  # noqa: E731
    return state._replace(moments=jax.tree.map(numbers, state.moments))


def with_left_out(model, count):
    return dataclasses.replace(model, d_ff=model.d_ff - count, left_out=count)


def drawn(model, count, seed):
    rng = np.random.default_rng(seed)
    rows = [np.sort(rng.permutation(model.d_ff)[:count]) for _ in range(model.num_layers)]
    return np.stack(rows).astype(np.int32)


@settings(max_examples=examples(12), deadline=None)
@given(
    model=st.sampled_from([MODEL, GATED, SPARSE]),
    count=st.integers(1, 31),
    seed=st.integers(0, 99),
    optimizer=st.sampled_from(["adamw", "muon"]),
    on_host=st.booleans(),
)
def test_features_come_back_in_place_with_zero_moments(model, count, seed, optimizer, on_host):
    state, narrow = filled(model, optimizer), with_left_out(model, count)
    if on_host:
        state = state._replace(**jax.device_get({"params": state.params, "moments": state.moments}))
    positions = drawn(model, count, seed)
    out = omission.leave_out(state, narrow, positions)
    shapes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)  # noqa: E731
    training = dataclasses.replace(TRAINING, optimizer=optimizer)
    expected = abstract_state(narrow, training)
    assert shapes(out.params) == shapes(expected.params)
    assert shapes(adam_state(out.moments)) == shapes(adam_state(expected.moments))
    back = omission.put_back(out, narrow)
    same = jax.tree.map(np.array_equal, back.params, state.params)
    assert all(jax.tree.leaves(same))
    assert jax.tree.structure(back.rest) == jax.tree.structure(state.rest)
    for before, after in (
        (adam_state(state.moments).mu, adam_state(back.moments).mu),
        (adam_state(state.moments).nu, adam_state(back.moments).nu),
    ):
        for path, leaf in jax.tree_util.tree_leaves_with_path(before):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            new = dict(_named(after))[name]
            axis = {"mlp_in": -1, "mlp_gate": -1, "mlp_out": -2}.get(name.split("/")[-2])
            if axis is None or name.endswith("mlp_out/bias"):
                np.testing.assert_array_equal(new, leaf)
                continue
            first = _first_layer(name, model)
            for layer, (a, b) in enumerate(zip(np.asarray(leaf), np.asarray(new), strict=True)):
                there = np.zeros(model.d_ff, bool)
                there[positions[first + layer]] = True
                a, b = (np.moveaxis(x, axis, 0) for x in (a, b))
                np.testing.assert_array_equal(b[~there], a[~there])
                assert not b[there].any()


def _named(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(p, simple=True, separator="/"), leaf) for p, leaf in leaves]


def _first_layer(name, model):
    group = name.split("/")[1]
    return int(group) if model.density_by_depth else 0


@pytest.mark.parametrize("model", [MODEL, GATED, SPARSE])
def test_a_phase_computes_the_model_without_the_features(model):
    state, positions = initial_state(model, TRAINING), drawn(model, 12, 3)
    narrow = with_left_out(model, 12)
    params = jax.tree.map(jnp.array, state.params)
    start = 0
    groups = params["blocks"] if isinstance(params["blocks"], tuple) else (params["blocks"],)
    for group in groups:
        kernel = group["mlp_out"]["kernel"]
        for layer in range(len(kernel)):
            kernel = kernel.at[layer, positions[start + layer]].set(0)
        group["mlp_out"]["kernel"], start = kernel, start + len(kernel)
    batch = Batch.from_windows(jnp.asarray(TOKENS), jnp.full((4, 8), 1 / 32))
    weights = lambda model, s: stacks.weights_of(model, s.merged)  # noqa: E731
    right = whole.loss(model, weights(model, state._replace(params=params)), batch)
    out = omission.leave_out(state, narrow, positions)
    assert float(whole.loss(narrow, weights(narrow, out), batch)) == pytest.approx(
        float(right), rel=1e-6
    )


def test_magnitudes_are_the_mean_absolute_hidden_features():
    """Without attention's output the MLP reads the normalised embeddings."""
    model = dataclasses.replace(MODEL, num_layers=1, activation="relu", positions="none")
    state = initial_state(model, TRAINING)
    block = state.params["blocks"]
    block["attn_out"] = jax.tree.map(jnp.zeros_like, block["attn_out"])
    batches = [Batch.from_windows(jnp.asarray(rows)) for rows in (TOKENS[:2], TOKENS[2:])]
    measured = omission.magnitudes(model, state.merged, batches, Portions(1, 3, 2))
    x = np.asarray(state.params["embed"]["tokens"], np.float64)[TOKENS[:3, :-1]]
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    hidden = x @ np.asarray(block["mlp_in"]["kernel"][0], np.float64)
    np.testing.assert_allclose(measured[0], np.maximum(hidden, 0).mean((0, 1)), rtol=1e-4)


def test_features_are_drawn_between_uniform_and_top():
    importance = np.array([1.0, 2.0, 3.0, 10.0])
    rng = np.random.default_rng
    assert omission.least(importance, 2, False, rng(0)).tolist() == [0, 1]
    draws = [omission.least(importance, 3, True, rng(seed)) for seed in range(4000)]
    kept = np.bincount([(set(range(4)) - set(each.tolist())).pop() for each in draws])
    np.testing.assert_allclose(kept / 4000, importance / 16, atol=0.025)
    even = [omission.least(np.ones(4), 3, True, rng(seed)) for seed in range(4000)]
    kept = np.bincount([(set(range(4)) - set(each.tolist())).pop() for each in even])
    np.testing.assert_allclose(kept / 4000, 1 / 4, atol=0.025)
    assert len(omission.least(np.zeros(4), 2, True, rng(1))) == 2


def test_the_ladder_falls_and_the_whole_model_ends():
    model = dataclasses.replace(MODEL, d_ff=4096)
    specs = phase_specs(model, EvolutionConfig("omit_features", at=0.8))
    assert [spec.model.left_out for spec in specs] == [0, 2048, 1536, 1024, 512, 0]
    assert all(spec.model.with_all_features == model for spec in specs)
    assert [spec.start for spec in specs] == pytest.approx([0, 0.04, 0.23, 0.42, 0.61, 0.8])
    wide = phase_specs(model, EvolutionConfig("omit_features", omitted=0.999))
    assert wide[1].model.d_ff == 128  # A tile stays.


def test_mean_flops_are_those_of_the_phases():
    specs = phase_specs(MODEL, EVOLUTION)
    stops = [*(spec.start for spec in specs[1:]), 1.0]
    flops = [cost.flops_per_token(spec.model, 8).total for spec in specs]
    expected = sum((b - a.start) * f for a, b, f in zip(specs, stops, flops, strict=True))
    assert mean_flops_per_token(MODEL, EVOLUTION, 8) == pytest.approx(expected)


def test_flops_count_the_phases_and_what_is_measured():
    forward = cost.flops_per_token(MODEL, 8, training=False).total
    spans = phases(MODEL, EVOLUTION, 20)
    trained = sum(p.steps * 32 * cost.flops_per_token(p.model, 8).total for p in spans)
    assert run_flops(MODEL, EVOLUTION, TRAINING) == pytest.approx(trained + 4 * 32 * 8 * forward)
    uniform = dataclasses.replace(EVOLUTION, features="uniform")
    assert run_flops(MODEL, uniform, TRAINING) == pytest.approx(trained)
    assert trained < 20 * 32 * cost.flops_per_token(MODEL, 8).total


@pytest.mark.parametrize(
    ("model", "fields", "words"),
    [
        (
            MODEL.with_linears(LinearSpec("block_sparse", "monarch", 0.5, 8), ["mlp_in"]),
            {},
            "dense MLPs, and mlp_in has block-sparse weights; legal: sparsity.projections",
        ),
        (MODEL.with_linears(LinearSpec(rank=2)), {}, "mlp_in has a low-rank term"),
        (dataclasses.replace(MODEL, experts=2), {}, "model.experts=2 is not supported"),
        (MODEL, {"omitted": 0.02}, r"omitted=0.02 leaves out none of 48 .*; legal: 0.04"),
    ],
)
def test_models_without_plain_hidden_features_are_refused(model, fields, words):
    with pytest.raises(UserError, match=words):
        phase_specs(model, EvolutionConfig("omit_features", **fields))


def test_a_run_too_short_for_the_ladder_is_refused():
    with pytest.raises(UserError, match=r"has 6 phases, the last from 75% .* one of them has none"):
        refuse_unfit(MODEL, EvolutionConfig("omit_features"), 8)


@pytest.fixture
def started(monkeypatch):
    """(folder) -> a training of omit_features."""
    monkeypatch.setattr(evolving, "TRAINING", TRAINING)
    monkeypatch.setitem(evolving.EVOLUTIONS, "omit_features", EVOLUTION)
    monkeypatch.setitem(evolving.MODELS, "omit_features", MODEL)
    monkeypatch.setattr(loop, "non_finite", lambda state: [])
    return functools.partial(evolving.trainer, method="omit_features")


@pytest.mark.slow
def test_a_resumed_run_ends_at_the_same_bits(tmp_path, started):
    run = evolving.train(started(tmp_path / "run"), until=20)
    starts = [phase.start for phase in run.phases[1:]]
    changes = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "parameters" in r]
    assert [row["step"] - 1 for row in changes] == starts
    assert changes[0]["parameters"] < changes[-1]["parameters"]
    for stop in (starts[0], starts[1] + 1, starts[-1]):
        t = evolving.train(started(tmp_path / "cut"), until=stop)
        assert LEFT_OUT not in (t.programs.rest(t.state) or {"blocks": {}})["blocks"]
        t.close()
    cut = evolving.train(started(tmp_path / "cut"), until=20)
    bits = lambda t: [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(t.state.params)]  # noqa: E731
    assert cut.finished and bits(cut) == bits(run)


@pytest.mark.slow
def test_nothing_is_compiled_while_it_trains(tmp_path, started):
    t = started(tmp_path)
    t.evaluate()
    t.save()
    learning_rate_schedule(TRAINING)(3)  # Its scalars compile once per process.
    assert not evolving.compiled_while(lambda: evolving.train(t, until=20))
    assert t.finished


def test_the_number_of_micro_batches_is_part_of_the_identity():
    """Activations are measured by micro-batches."""
    of = lambda evolution, n: identity(  # noqa: E731
        MODEL, dataclasses.replace(TRAINING, micro_batches=n), evolution, "hash"
    )
    assert of(EVOLUTION, 1) != of(EVOLUTION, 2)
    static = EvolutionConfig()
    assert of(static, 1) == of(static, 2)
