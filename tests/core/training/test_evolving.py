"""Trainings whose layouts or model change: resumed bit by bit, compiled before they start."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from evolving import EVOLUTIONS, MODEL, MODELS, TRAINING, compiled_while, train, trainer

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors.block_gradients import Portions, mean_norms, portions
from sparse_dataflow.core.layouts import model_layouts
from sparse_dataflow.core.model import stacks
from sparse_dataflow.core.optim.optimizers import learning_rate_schedule
from sparse_dataflow.core.training import cost, hooks, loop
from sparse_dataflow.core.training.phases import phases, refuse_unfit, run_flops, update_steps
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.monitoring.metrics import read_metrics

DAILY = "gradual", "shared_to_own", "rigl_by_depth"


def bits(state):
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(leaf) if "key" in jax.tree_util.keystr(path)[:5] else leaf
        ).tobytes()
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def untimed(path):
    times = ("seconds", "update_seconds", "tokens_per_second")
    return [{k: v for k, v in row.items() if k not in times} for row in read_metrics(path)]


@pytest.mark.slow
@pytest.mark.parametrize("share", [1e-3, 0.02])
def test_a_share_that_rounds_to_no_block_exchanges_one_of_each_layer(tmp_path, share):
    evolution = dataclasses.replace(EVOLUTIONS["set"], share=share)
    t = train(trainer(tmp_path, "set", evolution), until=3)
    first = model_layouts.layouts(MODEL)
    last = stacks.layouts_of(MODEL, t.state.rest)
    new = {
        name: [int((b.mask & ~a.mask).sum()) for a, b in zip(first[name], last[name], strict=True)]
        for name in MODEL.sparse_projections
    }
    assert all(round(share * layout.nnz) == 0 for layout in first["attn_out"])
    expected = {name: [max(1, round(share * x.nnz)) for x in first[name]] for name in new}
    assert new == expected
    [row] = [r for r in read_metrics(tmp_path / "metrics.jsonl") if r["kind"] == "evolution"]
    stored = sum(layout.nnz for layers in first.values() for layout in layers)
    assert row["exchanged"] == pytest.approx(sum(map(sum, new.values())) / stored)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        # Other cases of this list cover these mostly; test_evolution_runs.py kills a run of
        # sparse_to_dense.
        pytest.param(name, marks=() if name in DAILY else pytest.mark.nightly)
        for name in EVOLUTIONS
    ],
)
def test_a_resumed_run_ends_at_the_same_bits(tmp_path, method):
    whole = train(trainer(tmp_path / "whole", method))
    # Gradual begins a phase after steps 2, 4 and 6; one stop is in such a phase, one at its end.
    for stop in (3, 6) if method == "gradual" else (1, 2, 4, 5, 6, 7):
        t = train(trainer(tmp_path / "cut", method), until=stop)
        assert t.step == stop
    t = train(trainer(tmp_path / "cut", method))
    assert t.finished and bits(t.state) == bits(whole.state)
    timeless = [untimed(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut")]
    assert timeless[0] == timeless[1]
    changes = [row["step"] - 1 for row in timeless[0] if row["kind"] == "evolution"]
    starts = [phase.start for phase in phases(MODELS[method], EVOLUTIONS[method], 10)[1:]]
    assert changes == sorted(starts + update_steps(EVOLUTIONS[method], 10)) != []
    losses = [row["loss"] for row in timeless[0] if row["kind"] == "train"]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        "set",
        "rigl_by_depth",
        pytest.param("rigl", marks=pytest.mark.nightly),
    ],
)
def test_layouts_change_and_keep_their_fan_in(tmp_path, method):
    t, model = train(trainer(tmp_path, method)), MODELS[method]
    first, last = model_layouts.layouts(model), stacks.layouts_of(model, t.state.rest)
    for name in model.sparse_projections:
        for before, after in zip(first[name], last[name], strict=True):
            np.testing.assert_array_equal(after.fan_in, before.fan_in)
            assert after != before


@pytest.mark.parametrize(
    "method",
    [
        # Other cases of this list cover these mostly.
        pytest.param(name, marks=pytest.mark.nightly)
        if name in ("rigl", "mlp_dense_first", "dense_by_depth", "gradual_by_depth")
        else pytest.param(name, marks=() if name == "gradual" else pytest.mark.slow)
        for name in EVOLUTIONS
    ],
)
def test_nothing_is_compiled_while_it_trains(tmp_path, method, monkeypatch):
    # The check of a saved state is a small program for each structure.
    monkeypatch.setattr(loop, "non_finite", lambda state: [])
    t = trainer(tmp_path, method)
    t.evaluate()
    t.save()
    learning_rate_schedule(TRAINING)(3)  # Its scalars compile once per process.
    compiled = compiled_while(lambda: train(t))
    changes = [r for r in read_metrics(tmp_path / "metrics.jsonl") if r["kind"] == "evolution"]
    assert changes and not compiled


def test_the_dense_phase_starts_at_the_loss_of_the_sparse_model(tmp_path):
    t = train(trainer(tmp_path, "sparse_to_dense", eval_every=1), until=5)
    assert t.model == MODEL
    sparse = t.last_evaluation["loss"]
    t = trainer(tmp_path, "sparse_to_dense")
    hooks.Evolve().before_step(t)
    assert not t.model.sparse_projections and t.state.rest == ()
    assert t.evaluate()["loss"] == pytest.approx(sparse, rel=1e-5)
    t.close()


def test_another_method_is_refused(tmp_path):
    train(trainer(tmp_path, "set"), until=2)
    other = dataclasses.replace(EVOLUTIONS["set"], method="rigl")
    with pytest.raises(UserError, match=r'evolution.method is "set" there and "rigl" here'):
        trainer(tmp_path, "set", other)


@pytest.mark.parametrize(
    ("fields", "steps", "words"),
    [
        ({"method": "rigl"}, 50, "--set evolution.every=100 .* step 37 of 50; legal: 1 to 37"),
        ({"method": "set", "every": 8}, 10, "step 7 of 10; legal: 1 to 7"),
        ({"method": "set", "every": 1}, 1, "none in a run of 1 steps"),
        ({"method": "sparse_to_dense", "at": 0.999}, 100, "has 2 phases, .* from 100% of"),
        ({"method": "gradual"}, 3, "has 3 phases"),
    ],
)
def test_a_schedule_longer_than_the_run_is_refused(fields, steps, words):
    with pytest.raises(UserError, match=words):
        refuse_unfit(MODEL, EvolutionConfig(**fields), steps)


def test_phases_cover_the_run():
    for name, evolution in EVOLUTIONS.items():
        spans = phases(MODELS[name], evolution, 97)
        assert spans[0].start == 0 and spans[-1].stop == 97
        assert all(a.stop == b.start for a, b in itertools.pairwise(spans))
        assert sum(phase.steps for phase in spans) == 97


@pytest.mark.parametrize(
    ("batch", "micro", "sequences", "expected"),
    [(8, 1, 32, (8, 4, 1)), (8, 4, 7, (2, 4, 4)), (64, 2, 8, (8, 1, 8)), (2, 2, 1, (1, 1, 2))],
)
def test_measured_sequences_come_in_micro_batches(batch, micro, sequences, expected):
    assert portions(TrainingConfig(1, batch, 8, micro), sequences) == expected


def test_norms_are_the_root_mean_square_over_portions_of_the_batches():
    batches = map(Batch, np.arange(48).reshape(6, 8, 1))
    measured = []

    def measure(batch):
        measured.append(batch.tokens.ravel().tolist())
        return {"qkv": np.float32(batch.tokens[:1])}

    norms = mean_norms(measure, batches, Portions(rows=4, calls=3, per_batch=2))
    assert measured == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert norms["qkv"] == pytest.approx(((0**2 + 4**2 + 8**2) / 3) ** 0.5)
    assert next(batches).tokens[0] == 16


def test_flops_of_a_run_are_the_sum_over_phases_and_updates():
    tokens = TRAINING.batch * TRAINING.sequence
    sparse = cost.flops_per_token(MODEL, 8).total
    dense = cost.flops_per_token(phases(MODEL, EVOLUTIONS["sparse_to_dense"], 10)[1].model, 8).total
    flops = {name: run_flops(MODEL, EVOLUTIONS[name], TRAINING) for name in EVOLUTIONS}
    assert flops["sparse_to_dense"] == pytest.approx(5 * tokens * (sparse + dense))
    assert flops["set"] == pytest.approx(10 * tokens * sparse)
    norms = cost.gradient_norms_flops(MODEL, 32 * 8, 8)
    assert flops["rigl"] == pytest.approx(
        flops["set"] + len(update_steps(EVOLUTIONS["rigl"], 10)) * norms
    )
    assert flops["set"] < flops["gradual"]
