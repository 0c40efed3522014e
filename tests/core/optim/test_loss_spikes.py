"""Steps with a loss spike change no bit, also after a resume; several in a row roll back."""

import dataclasses
import functools
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import some

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.checkpoint.checkpoint import Checkpoints
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.optim.loss_spikes import (
    MAX_ROLLBACKS,
    MAX_SKIPPED,
    MIN_LOSSES,
    WINDOW,
    SpikeHistory,
    is_accepted,
)
from sparse_dataflow.core.optim.optimizers import (
    NewRowsState,
    at_step,
    make_optimizer,
)
from sparse_dataflow.core.step_metrics import Norm, StepReport, Sum
from sparse_dataflow.core.training import hooks
from sparse_dataflow.core.training.loop import Trainer, advance_side_by_side
from sparse_dataflow.core.training.phases import Phase, Variant
from sparse_dataflow.core.training.programs import Compiled, TrainingData
from sparse_dataflow.core.training.step import initial_state, make_train_step
from sparse_dataflow.data.batches import EvalBatches, TrainBatches
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.monitoring.metrics import MetricsWriter, read_metrics
from sparse_dataflow.runs.mirror import copied_to

MODEL = ModelConfig(1, 8, 1, 32, 300, 4)
TRAINING = TrainingConfig(steps=40, batch=2, sequence=4, skip_spikes=6.0)
TOKENS = np.arange(200, dtype=np.uint16)
WINDOWS = EvalBatches(TOKENS, 2, 4, 4)
DATA = TrainingData(TrainBatches(TOKENS, 2, 4), WINDOWS, 16, WINDOWS, 16, "hash")
LOSSES = st.lists(st.floats(0.125, 20, width=32), max_size=WINDOW + 20)


@given(LOSSES, st.floats(0.5, 10))
def test_the_limit_follows_the_last_losses_and_survives_json(losses, sigmas):
    history = SpikeHistory()
    for loss in losses:
        history = history.with_accepted(loss)
    skipped = history.with_skipped()
    again = SpikeHistory.from_json(json.loads(json.dumps(skipped.to_json())))
    assert again == skipped and again.loss_limit(sigmas) == history.loss_limit(sigmas)
    last = losses[-WINDOW:]
    if len(last) < MIN_LOSSES:
        assert np.isinf(history.loss_limit(sigmas))
    else:
        limit = np.mean(last) + sigmas * np.std(last)
        np.testing.assert_allclose(history.loss_limit(sigmas), limit, rtol=1e-5)


@given(st.lists(st.integers(0, 60), unique=True), st.integers(1, 60), st.data())
def test_rollbacks_go_to_checkpoints_from_before_the_spike(saved, step, data):
    skipped = data.draw(st.integers(1, step))
    targets = [
        SpikeHistory((), skipped, rollbacks).rollback_step(saved, step)
        for rollbacks in range(MAX_ROLLBACKS)
    ]
    legal = {s for s in saved if s <= step - skipped}
    assert all(target in legal if legal else target is None for target in targets)
    if legal:
        assert targets[0] == max(legal) and targets == sorted(targets, reverse=True)


def trainer(folder, losses, training=TRAINING, **options):
    """Returns a trainer whose step adds one to every parameter; `losses` is {step: loss}."""

    def train_step(state, layouts, batch, learning_rate, limit):
        step = int(state.step)
        loss = losses.get(step + 1, 2.0 + 0.01 * (step % 3))
        accepted = is_accepted(loss, {}, limit)
        params = jax.tree.map(lambda p: jnp.floor(p) + 1 if accepted else p, state.params)
        after = at_step(state._replace(params=params), state.step + 1)
        return after, StepReport({"loss": Sum(loss), "gradient_norm": Norm({"embed": 1.0})})

    programs = [Compiled(train_step, lambda *_: {"loss": Sum(3.0)}, 0.0)]
    variant = Variant("sparse", MODEL, training)
    usual = hooks.usual(50, 4, training.skip_spikes)
    return Trainer(variant, folder, DATA, programs, usual, metrics=MetricsWriter, **options)


def train(t, steps=None):
    left = iter(range(steps if steps is not None else 10**9))
    try:
        for _ in advance_side_by_side([t], lambda: next(left, None) is None):
            t.checkpoints.wait()  # A mirror leaves out copies where saves follow at once.
    finally:
        t.close()
    return t


def rows(folder, *kinds):
    metrics = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second", "mfu")}
            for row in metrics if not kinds or row["kind"] in kinds]  # fmt: skip


def bits(t):
    leaves = jax.tree.leaves((t.state.params, t.state.moments, t.state.step))
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def test_a_spike_is_skipped_and_training_goes_on(tmp_path):
    t = train(trainer(tmp_path, {15: 50.0, 20: math.nan, 2: math.inf}))
    skipped = rows(tmp_path, "skipped")
    assert [(row["step"], row["loss"]) for row in skipped] == [(2, None), (15, 50.0), (20, None)]
    assert skipped[0]["limit"] is None and 2 < skipped[1]["limit"] < 3
    assert t.step == 40 and t.finished
    trained = [row["step"] for row in rows(tmp_path, "train")]
    assert trained == [s for s in range(1, 41) if s not in (2, 15, 20)]


def test_a_new_phase_begins_a_new_history(tmp_path, monkeypatch):
    """The model of the next phase has another loss, and so has that of an exchange of blocks."""
    monkeypatch.setattr(hooks, "convert_state", lambda state, *_: state)
    higher = {step: 4.0 for step in range(21, 31)} | {step: 8.0 for step in range(31, 41)}
    t = trainer(tmp_path, higher | {40: 50.0})
    t.phases = tuple(Phase(a, b, MODEL, False) for a, b in ((0, 20), (20, 30), (30, 40)))
    t._programs *= 3
    train(t)
    assert [row["step"] for row in rows(tmp_path, "skipped")] == [40]
    assert t.finished and not rows(tmp_path, "rollback")


SPIKES = {step: 50.0 for step in (14, 16, 17, 18, 19, 23)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder, trainer) of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(trainer(folder, SPIKES))


@pytest.mark.parametrize("stop", some([3, 13, 17, 18, 25], 18))
def test_a_resumed_run_skips_and_rolls_back_as_an_undisturbed_one(tmp_path, whole, stop):
    train(trainer(tmp_path, SPIKES), stop)
    resumed = train(trainer(tmp_path, SPIKES))
    folder, undisturbed = whole
    assert rows(folder) == rows(tmp_path)
    assert bits(undisturbed) == bits(resumed)
    [rollback] = rows(folder, "rollback")
    assert (rollback["step"], rollback["to"]) == (15 + MAX_SKIPPED, 12)


PREEMPTED = [
    ([13, 1, 1, 1, 1, 1], False),
    pytest.param([15, 1, 1, 1, 1], True, marks=pytest.mark.slow),
    pytest.param([1] * 45, False, marks=pytest.mark.nightly),
    pytest.param([1] * 45, True, marks=pytest.mark.nightly),
    pytest.param([12, 3, 2, 1, 5], False, marks=pytest.mark.nightly),
]
"""(steps that each start makes before it is stopped, whether only the mirror is left then)."""


@pytest.mark.parametrize(("starts", "lost"), PREEMPTED)
def test_a_run_that_is_often_preempted_rolls_back_to_the_same_checkpoints(tmp_path, starts, lost):
    """Three rollbacks follow each other; each goes back further."""
    losses = {step: 50.0 for step in (14, *range(16, 28), 33, 34, 35, 36)}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    mirror = copied_to(tmp_path / "mirror") if lost else None
    undisturbed = train(trainer(whole, losses))
    for steps in [*starts, None]:
        checkpoints = functools.partial(Checkpoints, mirror=mirror)
        resumed = train(trainer(cut, losses, checkpoints=checkpoints), steps)
        if lost and not resumed.finished:
            shutil.rmtree(cut / "checkpoints")
    assert resumed.finished and bits(undisturbed) == bits(resumed)
    assert rows(whole, "skipped", "rollback") == rows(cut, "skipped", "rollback")
    assert len(rows(whole, "rollback")) == 4


def test_a_rollback_restores_the_parameters_of_the_checkpoint(tmp_path):
    t = trainer(tmp_path, {step: 50.0 for step in range(16, 16 + MAX_SKIPPED)})
    for _ in range(12):
        t.advance()
    before = bits(t)[:-1]
    for _ in range(3):
        t.advance()
    assert bits(t)[:-1] != before
    for _ in range(MAX_SKIPPED):
        t.advance()
    assert bits(t)[:-1] == before and int(t.state.step) == t.step == 15 + MAX_SKIPPED
    t.close()


def test_a_run_that_spikes_after_every_rollback_ends_with_an_error(tmp_path):
    spiking = trainer(tmp_path, {step: 50.0 for step in range(16, 41)})
    with pytest.raises(UserError, match=r"spikes again .* after 3 rollbacks.*--learning_rate"):
        train(spiking)


def test_a_skipped_step_changes_no_bit_of_parameters_and_moments():
    model = ModelConfig(1, 8, 1, 32, 300, 8)
    training = TrainingConfig(steps=4, batch=2, sequence=8, skip_spikes=3.0)
    step = jax.jit(make_train_step(model, training))
    state = initial_state(model, training)
    batch = Batch.from_windows(jax.random.randint(jax.random.key(0), (2, 9), 0, 300))
    free, report = step(state, batch, 1e-2, np.float32(np.inf))
    plain, _ = jax.jit(make_train_step(model, dataclasses.replace(training, skip_spikes=0.0)))(
        state, batch, 1e-2
    )
    same, _ = step(state, batch, 1e-2, np.float32(report.loss))
    none, _ = step(state, batch, 1e-2, np.nextafter(np.float32(report.loss), np.float32(0)))
    for result, expected in ((same, free), (plain, free), (none, state._replace(step=free.step))):
        for leaf, right in zip(jax.tree.leaves(result[:3]), jax.tree.leaves(expected[:3])):
            assert np.asarray(leaf).tobytes() == np.asarray(right).tobytes()
    broken = state._replace(params=jax.tree.map(lambda p: p * np.nan, state.params))
    skipped, _ = step(broken, batch, 1e-2, np.float32(np.inf))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(skipped.moments))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("section", ["embed", "blocks", "head"])
def test_a_gradient_that_is_not_finite_is_no_step_whatever_the_loss(section, bad):
    training = TrainingConfig(steps=4, batch=2, sequence=8, skip_spikes=3.0)
    state = initial_state(MODEL, training)
    gradients = jax.tree.map(jnp.ones_like, state.params)
    spoilt = jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].set(bad), gradients[section])

    class Fixed:
        def __init__(self, gradients):
            self.gradients = gradients

        def loss_and_gradients(self, *_):
            return {"loss": Sum(jnp.float32(1))}, self.gradients

    def params_after(gradients):
        step = make_train_step(MODEL, training, Fixed(gradients))
        return step(state, Batch.from_windows(jnp.zeros((2, 9), jnp.int32)), 1e-2, np.float32(2))[
            0
        ].params

    after = params_after({**gradients, section: spoilt})
    jax.tree.map(np.testing.assert_array_equal, after, state.params)
    moved = params_after(gradients)
    assert not np.array_equal(moved["embed"]["tokens"], state.params["embed"]["tokens"])


@pytest.mark.parametrize(
    "optimizer, steps, first, skipped",
    some(
        [
            ("adamw", 5, 0.4, {0}),
            ("muon", 8, 0.5, {1, 2, 3}),
            ("lion", 6, 0.34, {1, 4}),
            ("schedule_free", 4, 0.75, set()),
        ],
        "muon",
    ),
)
def test_new_rows_alone_are_trained_in_a_fraction_of_all_steps(optimizer, steps, first, skipped):
    training = TrainingConfig(
        steps, 2, 4, optimizer=optimizer, skip_spikes=3.0, new_rows=(290, 10), new_rows_first=first
    )
    step = jax.jit(make_train_step(MODEL, training))
    state = initial_state(MODEL, training)
    state = state._replace(moments=make_optimizer(MODEL, training).init(state.params))
    batch = Batch.from_windows(jax.random.randint(jax.random.key(0), (2, 5), 0, 300))
    moved = []
    for number in range(steps):
        before = state.params["blocks"]
        limit = np.float32(0 if number in skipped else np.inf)
        state, _ = step(state, batch, np.float32(1e-2), limit)
        equal = jax.tree.map(np.array_equal, before, state.params["blocks"])
        moved.append(not jax.tree.all(equal))
    alone = round(first * steps)
    assert moved == [n >= alone and n not in skipped for n in range(steps)]


@pytest.mark.parametrize(
    "first, losses, rollbacks",
    some(
        [
            (0.5, {14: 50.0}, 0),
            (0.6, SPIKES, 1),
            (0.9, {step: 50.0 for step in (*range(16, 20), *range(24, 28))}, 2),
        ],
        0.6,
    ),
)
def test_new_rows_alone_are_trained_as_long_after_a_rollback(tmp_path, first, losses, rollbacks):
    training = dataclasses.replace(TRAINING, new_rows=(290, 10), new_rows_first=first)
    state = initial_state(MODEL, training)
    state = state._replace(moments=make_optimizer(MODEL, training).init(state.params))
    t = trainer(tmp_path, losses, training, start=lambda: state)
    while not t.finished:
        t.advance()
        (left,) = (entry.left for entry in t.state.moments if isinstance(entry, NewRowsState))
        assert int(left) == max(0, round(40 * first) - t.step)
    t.close()
    assert len(rows(tmp_path, "rollback")) == rollbacks
