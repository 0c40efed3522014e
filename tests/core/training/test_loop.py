"""The training loop: broken steps end it, a resume repeats nothing, trainers take turns."""

import contextlib
import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
from marks import some

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.sparsity import EvolutionConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.layouts import patterns
from sparse_dataflow.core.step_metrics import Load, Mean, Norm, StepReport, Sum
from sparse_dataflow.core.training import hooks, loop
from sparse_dataflow.core.training.loop import Trainer, advance_side_by_side
from sparse_dataflow.core.training.phases import Variant, phases
from sparse_dataflow.core.training.programs import Compiled, HeldOut, TrainingData
from sparse_dataflow.core.training.saved_state import refuse_other_layouts
from sparse_dataflow.data.batches import EvalBatches, TrainBatches
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.monitoring.metrics import MetricsWriter, read_metrics

MODEL = ModelConfig(1, 8, 1, 32, 300, 4)
TRAINING = TrainingConfig(steps=9, batch=2, sequence=4)
TOKENS = np.arange(200, dtype=np.uint16)
WINDOWS = EvalBatches(TOKENS, 2, 4, 4)
DATA = TrainingData(TrainBatches(TOKENS, 2, 4), WINDOWS, 16, WINDOWS, 16, "hash")


def trainer(folder, bad_step=None, bad="gradients", training=TRAINING, **options):
    """Returns a trainer whose step adds one to every parameter and fails at `bad_step`."""

    def train_step(state, layouts, batch, learning_rate):
        step = int(state.step) + 1
        broken = step == bad_step
        params = jax.tree.map(lambda p: p + 1, state.params)
        if broken:
            params["blocks"]["qkv"]["kernel"] = params["blocks"]["qkv"]["kernel"] * np.nan
        if bad == "moments" and step >= (bad_step or 1e9):
            return spoiled(state, step), report_of(2.0, {"embed": 1.0})
        norms = {"embed": 1.0, "blocks.qkv": np.nan if broken and bad == "gradients" else 1.0}
        loss = np.inf if broken and bad == "loss" else 2.0
        metrics: dict[str, Any] = {}
        if bad == "router":
            z = np.array([1.0, np.nan, np.nan] if broken else [1.0, 1.0, 1.0])
            choices = np.array([[2.0, 2.0], [1.0, 3.0], [4.0, 0.0]])
            loss, count = np.nan if broken else loss, np.full(3, 4.0)
            metrics = {
                "balance_loss": Mean(np.full(3, 4.0), count), "router_z_loss": Mean(4 * z, count),
                "dropped": Mean(np.full(3, 0.4), count), "busiest_expert": Load(choices),
            }  # fmt: skip
        after = state._replace(step=state.step + 1, params=params)
        return after, report_of(loss, norms, **metrics)

    programs = [Compiled(train_step, lambda *_: {"loss": Sum(3.0)}, 0.0)]
    every = {"eval_every": 4, "checkpoint_every": 2} | options
    variant = Variant("sparse", MODEL, training)
    return Trainer(variant, folder, DATA, programs, hooks.usual(**every), metrics=MetricsWriter)


def report_of(loss, norms, **metrics):
    squares = {group: norm**2 for group, norm in norms.items()}
    return StepReport({"loss": Sum(loss), "gradient_norm": Norm(squares), **metrics})


def spoiled(state, step):
    """A state after a step in which a second moment is infinite."""
    paths, tree = jax.tree_util.tree_flatten_with_path(state.moments)
    leaves = [
        leaf.at[0].set(np.inf) if "nu" in str(path) and "embed" in str(path) else leaf
        for path, leaf in paths
    ]
    return state._replace(step=np.int32(step), moments=tree.unflatten(leaves))


def train(trainers, stop=lambda: False):
    try:
        return list(advance_side_by_side(trainers, stop))
    finally:
        for t in trainers:
            t.close()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("gradients", r"step 5 is not finite \(gradients of blocks\.qkv, loss 2\.0\)"),
        pytest.param("loss", r"step 5 is not finite \(loss inf\)", marks=pytest.mark.slow),
        ("router", r"step 5 is not finite \(loss nan, router_z_loss of layer 1\)"),
        # A step with finite gradients may break parameters; the next save detects it.
        ("parameters", r"step 6 is not finite \(parameters of blocks\.qkv\)"),
        ("moments", r"step 6 is not finite \(moments of embed\)"),
    ],
)
def test_a_broken_step_is_named_and_never_saved(tmp_path, bad, words):
    t = trainer(tmp_path, 5, bad)
    with pytest.raises(UserError, match=rf"sparse: {words}.*Last good checkpoint: step 4;"):
        train([t])
    again = trainer(tmp_path)
    again.close()
    assert again.step == 4
    assert all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(again.state.params))


@pytest.mark.parametrize("value", some([np.nan, np.inf, -np.inf], -np.inf))
@pytest.mark.parametrize("field", some(["params", "moments"], "moments"))
def test_a_checkpoint_that_is_not_finite_is_passed_over(
    tmp_path, caplog, monkeypatch, field, value
):
    """As one of a version that did not check, or of memory that failed while it was written."""
    t = trainer(tmp_path)
    for _ in range(4):
        t.advance()
    leaves, tree = jax.tree.flatten(getattr(t.state, field))
    spoil = max(range(len(leaves)), key=lambda i: leaves[i].size)
    leaves[spoil] = leaves[spoil].reshape(-1).at[-1].set(value).reshape(leaves[spoil].shape)
    t.state, t.step = t.state._replace(**{field: tree.unflatten(leaves), "step": np.int32(5)}), 5
    with monkeypatch.context() as patch:
        patch.setattr(loop, "non_finite", lambda state: [])
        t.save()
    t.close()
    kind = {"params": "parameters", "moments": "moments"}[field]
    for _ in range(2):
        again = trainer(tmp_path)
        again.close()
        assert again.step == 4
    assert caplog.text.count(f"cannot be used: it is not finite ({kind} of ") == 1
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2", "4", "5.damaged"}


def test_metrics_have_the_routing_of_a_mixture_of_experts(tmp_path):
    train([trainer(tmp_path, bad="router")])
    rows = read_metrics(tmp_path / "metrics.jsonl")
    step = next(row for row in rows if row["kind"] == "train")
    numbers = (step[name] for name in ("balance_loss", "router_z_loss", "dropped"))
    np.testing.assert_allclose(list(numbers), [1, 1, 0.1])
    assert step["busiest_expert"] == 2
    loads = {row["step"]: row["load"] for row in rows if row["kind"] == "routing"}
    assert list(loads) == [4, 8, 9] and loads[9][1] == [0.25, 0.75]


def test_a_resumed_trainer_repeats_nothing_in_its_metrics(tmp_path):
    train([trainer(tmp_path / "whole")])
    stops = iter([False] * 5 + [True])
    train([trainer(tmp_path / "cut")], lambda: next(stops))
    assert [r["step"] for r in read_metrics(tmp_path / "cut/metrics.jsonl")] == [1, 2, 3, 4, 4, 5]
    with (tmp_path / "cut/metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 6, "tokens": 48, "sec')  # As after a kill.
    train([trainer(tmp_path / "cut")])
    facts = [
        [(r["kind"], r["step"], r["tokens"]) for r in read_metrics(tmp_path / name)]
        for name in ("whole/metrics.jsonl", "cut/metrics.jsonl")
    ]
    assert facts[0] == facts[1]
    assert [f for f in facts[0] if f[0] == "eval"] == [("eval", s, 8 * s) for s in (4, 8, 9)]


def test_the_next_step_goes_to_the_trainer_with_the_smallest_fraction_done(tmp_path):
    short = trainer(tmp_path / "short", training=dataclasses.replace(TRAINING, steps=3))
    long = trainer(tmp_path / "long")
    order = train([short, long])
    assert [order[: 4 * n].count(short) for n in (1, 2, 3)] == [1, 2, 3]
    assert len(order) == 12


def test_layouts_that_a_pattern_does_not_choose_any_more_are_refused(tmp_path, monkeypatch):
    """Programs of static layouts are specialised to them."""
    model = dataclasses.replace(MODEL, d_model=32, d_ff=128)
    model = model.with_linears(LinearSpec("block_sparse", "monarch", 0.5, 8))
    programs = [Compiled(None, None, 0.0)]

    def resume():
        every = {"eval_every": 4, "checkpoint_every": 2}
        variant = Variant("sparse", model, TRAINING)
        return Trainer(
            variant, tmp_path, DATA, programs, hooks.usual(**every), metrics=MetricsWriter
        )

    first = resume()
    first.save()
    first.close()
    resume().close()
    with monkeypatch.context() as patch:
        patch.setitem(patterns.PATTERNS, "monarch", lambda *sides, **_: patterns.banded(*sides))
        with pytest.raises(UserError, match=r"layouts of attn_out, mlp_in, .* legal: that version"):
            resume()
        # Programs of imported layouts take them as arguments.
        (phase,) = phases(model, EvolutionConfig(given_layouts=True), TRAINING.steps)
        refuse_other_layouts(first.state, phase)


def test_only_remat_may_change_between_a_checkpoint_and_its_resumption(tmp_path):
    train([trainer(tmp_path)])
    every = {"eval_every": 4, "checkpoint_every": 2}
    programs = [Compiled(None, None, 0.0)]
    remat = dataclasses.replace(MODEL, remat="full")
    variant = Variant("sparse", remat, TRAINING)
    t = Trainer(variant, tmp_path, DATA, programs, hooks.usual(**every), metrics=MetricsWriter)
    t.close()
    assert t.finished
    with pytest.raises(UserError, match=r"another config.*norm"):
        other = Variant("sparse", dataclasses.replace(MODEL, norm="rmsnorm"), TRAINING)
        Trainer(other, tmp_path, DATA, programs, hooks.usual(**every), metrics=MetricsWriter)


def test_a_mixture_has_a_loss_for_each_corpus_and_their_weighted_mean(tmp_path, monkeypatch):
    short, long = EvalBatches(TOKENS[:9], 2, 4), EvalBatches(TOKENS[:17], 2, 4)
    mixture = (
        HeldOut("books", 0.75, short, 16, short, 16),
        HeldOut("code", 0.25, long, 64, long, 64),
    )
    monkeypatch.setitem(globals(), "DATA", dataclasses.replace(DATA, mixture=mixture))
    with contextlib.closing(trainer(tmp_path)) as t:
        row = t.evaluate()
    # Each batch has 3 nats: one of 8 tokens, two of 16.
    assert row["loss/books"] == row["loss/code"] == row["loss"] == 3 / 8
    assert row["bits_per_byte/books"] == pytest.approx(3 / 16 / np.log(2))
    assert row["bits_per_byte/code"] == pytest.approx(6 / 64 / np.log(2))
    mean_bytes = 0.75 * 16 / 8 + 0.25 * 64 / 16
    assert row["bits_per_byte"] == pytest.approx(3 / 8 / mean_bytes / np.log(2))


def test_a_broken_step_and_a_restart_are_alerts(tmp_path):
    with pytest.raises(UserError):
        train([trainer(tmp_path, bad_step=5)])
    train([trainer(tmp_path)])
    alerts = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert [(alert["kind"], alert["step"]) for alert in alerts] == [("nan", 5), ("restart", 4)]
