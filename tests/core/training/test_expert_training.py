"""A mixture of experts trains, drops choices beyond its capacity in training alone, and resumes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import tables_of

from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.layouts.evolution import PhaseSpec
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.training import hooks
from sparse_dataflow.core.training.loop import Trainer
from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.core.training.programs import TrainingData, compile_programs
from sparse_dataflow.core.training.step import make_eval_step
from sparse_dataflow.data.batches import EvalBatches, TrainBatches
from sparse_dataflow.monitoring.metrics import MetricsWriter, read_metrics

MODEL = ModelConfig(
    2, 16, 2, 32, vocab_size=300, max_len=8, experts=4, top_k=2, expert_capacity=0.5
).with_linears(LinearSpec("block_sparse", "monarch", 0.5, 4), ["mlp_in", "mlp_out"])
TRAINING = TrainingConfig(steps=4, batch=2, sequence=8, learning_rate=0.02)
TOKENS = np.random.default_rng(0).integers(0, 300, 400).astype(np.uint16)
WINDOWS = EvalBatches(TOKENS, 2, 8, 4)
DATA = TrainingData(TrainBatches(TOKENS, 2, 8), WINDOWS, 16, WINDOWS, 16, "hash")


@pytest.fixture(scope="module")
def programs():
    return compile_programs([PhaseSpec(0.0, MODEL)], TRAINING, DATA)


@pytest.mark.slow
def test_a_resumed_mixture_trains_to_the_same_bits(tmp_path, programs):
    def train(folder, steps):
        every = {"eval_every": 2, "checkpoint_every": 2}
        variant = Variant("sparse", MODEL, TRAINING)
        trainer = Trainer(
            variant, folder, DATA, programs, hooks.usual(**every), metrics=MetricsWriter
        )
        for _ in range(steps):
            trainer.advance()
        trainer.close()
        return trainer.state

    whole_run = train(tmp_path / "whole", 4)
    train(tmp_path / "cut", 3)
    resumed = train(tmp_path / "cut", 2)
    for ours, expected in zip(jax.tree.leaves(resumed.params), jax.tree.leaves(whole_run.params)):
        np.testing.assert_array_equal(ours, expected)
    rows = [r for r in read_metrics(tmp_path / "cut/metrics.jsonl") if r["kind"] == "train"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["dropped"] > 0 for row in rows)


@pytest.mark.slow
def test_evaluation_drops_no_choice():
    params = gpt.init(MODEL, jax.random.key(0))
    tables = tables_of(MODEL)
    tokens = jnp.asarray(TOKENS[:18].reshape(2, 9), jnp.int32)
    weights = jnp.full((2, 8), 1 / 16)
    dropless = dataclasses.replace(MODEL, expert_capacity=0.0)
    expected = jax.jit(
        lambda p: whole.loss(
            dropless, weights_of(dropless, p, tables), Batch.from_windows(tokens, weights)
        )
    )(params)
    batch = Batch.from_windows(tokens, weights)
    loss = jax.jit(make_eval_step(MODEL))(params, tables, batch)["loss"].total
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_auxiliary_losses_are_means_over_the_tokens_of_all_micro_batches():
    """Rows have unequal padding, and unequally many answers among their other tokens."""
    model = ModelConfig(
        1, 16, 2, 32, vocab_size=50, max_len=8, experts=4, top_k=2,
        balance_loss=0.0, router_z_loss=0.1,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda p: p + 0.1, gpt.init(model, jax.random.key(0)))

    @functools.partial(jax.jit, static_argnames="micro_batches")
    def run(params, batch, micro_batches):
        how = whole.Accumulation(micro_batches)
        return whole.loss_and_gradients(model, params, (), batch, how)

    for answers in ((7, 7, 1, 1), (8, 0, 3, 0), (1, 1, 1, 1)):
        tokens = rng.integers(0, 49, (4, 9)).astype(np.int32)
        ends = np.maximum(answers, rng.integers(1, 9, 4))
        tokens[np.arange(9) > ends[:, None]] = 49
        weights = (np.arange(8) >= 8 - np.array(answers)[:, None]).astype(np.float32)
        batch = Batch.from_windows(jnp.asarray(tokens), jnp.asarray(weights / weights.sum()))
        metrics, expected = run(params, batch, 1)
        real = np.sum(~((tokens[:, :-1] == 49) & (tokens[:, 1:] == 49)))
        assert float(metrics["router_z_loss"].count[0]) == real
        assert float(metrics["busiest_expert"].choices.sum()) == 2 * real
        others, gradients = run(params, batch, 4)
        mean = metrics["router_z_loss"].number()
        assert others["router_z_loss"].number() == pytest.approx(mean, rel=1e-5)
        for ours, right in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected)):
            np.testing.assert_allclose(ours, right, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("count", "devices"), [(2, 2), (3, 4), (4, 1)])
def test_micro_batches_of_experts_have_the_same_rows_on_any_number_of_devices(count, devices):
    rows = np.arange(24)
    expected = whole.split_rows(MODEL, rows, count)
    shards = [whole.split_rows(MODEL, shard, count) for shard in np.split(rows, devices)]
    np.testing.assert_array_equal(np.concatenate(shards, axis=1), expected)
    dense = ModelConfig(2, 16, 2, 32, vocab_size=300, max_len=8)
    np.testing.assert_array_equal(whole.split_rows(dense, rows, count).reshape(-1), rows)
