"""Steps whose loss leaps are skipped to the bit, the same after a resume, and taken back."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sparse_dataflow.config.model import ModelConfig
from sparse_dataflow.config.training import TrainingConfig

from sparse_dataflow.data.batches import EvalBatches, TrainBatches
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.optim.loss_spikes import LEAST, PATIENCE, ROLLBACKS, WINDOW, Spikes, counts
from sparse_dataflow.optim.train_state import StepReport
from sparse_dataflow.training.loop import Trainer
from sparse_dataflow.training.metrics import read_metrics
from sparse_dataflow.training.programs import Compiled, TrainingData
from sparse_dataflow.training.step import initial_state, make_train_step
from sparse_dataflow.training.turns import advance_side_by_side

MODEL = ModelConfig(1, 8, 1, 32, 300, 4)
TRAINING = TrainingConfig(steps=40, batch=2, sequence=4, skip_spikes=6.0)
TOKENS = np.arange(200, dtype=np.uint16)
HELD_OUT = EvalBatches(TOKENS, 2, 4, 4)
DATA = TrainingData(TrainBatches(TOKENS, 2, 4), HELD_OUT, 16, HELD_OUT, 16, "hash")
LOSSES = st.lists(st.floats(0.125, 20, width=32), max_size=WINDOW + 20)


def after(losses):
    spikes = Spikes()
    for loss in losses:
        spikes = spikes.good(loss)
    return spikes


@given(LOSSES, st.floats(0.5, 10))
def test_the_bound_is_that_of_the_last_losses_and_outlasts_json(losses, sigmas):
    spikes = after(losses)
    again = Spikes.from_json(json.loads(json.dumps(spikes.bad().to_json())))
    assert again == spikes.bad() and again.limit(sigmas) == spikes.limit(sigmas)
    last = losses[-WINDOW:]
    if len(last) < LEAST:
        assert np.isinf(spikes.limit(sigmas))
    else:
        limit = np.mean(last) + sigmas * np.std(last)
        np.testing.assert_allclose(spikes.limit(sigmas), limit, rtol=1e-5)


@given(st.lists(st.integers(0, 60), unique=True), st.integers(1, 60), st.integers(1, 8), st.data())
def test_it_goes_back_to_whole_checkpoints_from_before_the_spike_alone(whole, step, every, data):
    skipped = data.draw(st.integers(1, step))
    first = dataclasses.replace(Spikes(), skipped=skipped)
    targets = []
    for number in range(ROLLBACKS):
        targets.append(dataclasses.replace(first, rollbacks=number).target(whole, step, every))
    legal = {s for s in whole if s <= step - skipped and s % every == 0}
    assert all(target in legal if legal else target is None for target in targets)
    if legal:
        assert targets[0] == max(legal) and targets == sorted(targets, reverse=True)


def trainer(folder, losses, training=TRAINING):
    """A trainer whose step adds one to every parameter and tells its loss in `losses`."""

    def train_step(state, tokens, learning_rate, limit):
        step = int(state.step)
        loss = losses.get(step + 1, 2.0 + 0.01 * (step % 3))
        fits = counts(loss, {}, limit)
        params = jax.tree.map(lambda p: jnp.floor(p) + 1 if fits else p, state.params)
        return state._replace(step=state.step + 1, params=params), StepReport(loss, {"embed": 1.0})

    programs = [Compiled(train_step, lambda *_: 3.0, 0.0)]
    return Trainer(
        "sparse", folder, MODEL, training, DATA, programs, eval_every=50, checkpoint_every=4
    )


def train(t, steps=None):
    left = iter(range(steps if steps is not None else 10**9))
    try:
        for _ in advance_side_by_side([t], lambda: next(left, None) is None):
            pass
    finally:
        t.close()
    return t


def facts(folder, *kinds):
    rows = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_second", "mfu")}
            for row in rows if not kinds or row["kind"] in kinds]  # fmt: skip


def bits(t):
    leaves = jax.tree.leaves((t.state.params, t.state.moments, t.state.step))
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def test_a_leap_is_skipped_and_the_step_goes_on(tmp_path):
    t = train(trainer(tmp_path, {15: 50.0, 20: math.nan, 2: math.inf}))
    skipped = facts(tmp_path, "skipped")
    assert [(row["step"], row["loss"]) for row in skipped] == [(2, None), (15, 50.0), (20, None)]
    assert skipped[0]["limit"] is None and 2 < skipped[1]["limit"] < 3
    assert t.step == 40 and t.finished
    trained = [row["step"] for row in facts(tmp_path, "train")]
    assert trained == [s for s in range(1, 41) if s not in (2, 15, 20)]


LEAPS = {step: 50.0 for step in (14, 16, 17, 18, 19, 23)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder, trainer) of a run that is not stopped."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(trainer(folder, LEAPS))


@pytest.mark.parametrize("stop", [3, 13, 17, 18, 25])
def test_a_run_that_is_stopped_skips_and_goes_back_as_one_that_is_not(tmp_path, whole, stop):
    train(trainer(tmp_path, LEAPS), stop)
    cut = train(trainer(tmp_path, LEAPS))
    folder, right = whole
    assert facts(folder) == facts(tmp_path)
    assert bits(right) == bits(cut)
    [back] = facts(folder, "rollback")
    assert (back["step"], back["to"]) == (15 + PATIENCE, 12)


def test_after_going_back_the_parameters_are_those_of_the_checkpoint(tmp_path):
    t = trainer(tmp_path, {step: 50.0 for step in range(16, 16 + PATIENCE)})
    for _ in range(12):
        t.advance()
    before = bits(t)[:-1]
    for _ in range(3):
        t.advance()
    assert bits(t)[:-1] != before
    for _ in range(PATIENCE):
        t.advance()
    assert bits(t)[:-1] == before and int(t.state.step) == t.step == 15 + PATIENCE
    t.close()


def test_where_going_back_does_not_help_the_run_ends_in_words(tmp_path):
    bad = trainer(tmp_path, {step: 50.0 for step in range(16, 41)})
    with pytest.raises(UserError, match=r"leaps again, after going back 3 times.*--learning_rate"):
        train(bad)


def test_the_step_itself_keeps_every_bit_where_it_does_not_count():
    model = ModelConfig(1, 8, 1, 32, 300, 8)
    training = TrainingConfig(steps=4, batch=2, sequence=8, skip_spikes=3.0)
    step = jax.jit(make_train_step(model, training))
    state = initial_state(model, training)
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 300)
    free, report = step(state, tokens, 1e-2, np.float32(np.inf))
    plain, _ = jax.jit(make_train_step(model, dataclasses.replace(training, skip_spikes=0.0)))(
        state, tokens, 1e-2
    )
    same, _ = step(state, tokens, 1e-2, np.float32(report.loss))
    none, _ = step(state, tokens, 1e-2, np.nextafter(np.float32(report.loss), np.float32(0)))
    for got, expected in ((same, free), (plain, free), (none, state._replace(step=free.step))):
        for mine, right in zip(jax.tree.leaves(got[:3]), jax.tree.leaves(expected[:3])):
            assert np.asarray(mine).tobytes() == np.asarray(right).tobytes()
    broken = state._replace(params=jax.tree.map(lambda p: p * np.nan, state.params))
    kept, _ = step(broken, tokens, 1e-2, np.float32(np.inf))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(kept.moments))
