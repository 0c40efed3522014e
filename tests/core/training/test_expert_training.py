"""A mixture of experts trains, drops choices beyond its capacity in training alone, and resumes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import tables_of

from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.layouts.evolution import PhaseSpec
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.training import hooks
from sparse_dataflow.core.training.batches import EvalBatches, TrainBatches
from sparse_dataflow.core.training.loop import Trainer
from sparse_dataflow.core.training.monitoring.metrics import read_metrics
from sparse_dataflow.core.training.phases import Variant
from sparse_dataflow.core.training.programs import TrainingData, compile_programs
from sparse_dataflow.core.training.step import make_eval_step

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


def test_a_resumed_mixture_trains_to_the_same_bits(tmp_path, programs):
    def train(folder, steps):
        every = {"eval_every": 2, "checkpoint_every": 2}
        variant = Variant("sparse", MODEL, TRAINING)
        trainer = Trainer(variant, folder, DATA, programs, hooks.usual(**every))
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


def test_evaluation_drops_no_choice():
    params = gpt.init(MODEL, jax.random.key(0))
    tables = tables_of(MODEL)
    tokens = jnp.asarray(TOKENS[:18].reshape(2, 9), jnp.int32)
    weights = jnp.full((2, 8), 1 / 16)
    dropless = dataclasses.replace(MODEL, expert_capacity=0.0)
    expected = jax.jit(
        lambda p: whole.loss(dropless, weights_of(p, tables), whole.Batch(tokens, weights))
    )(params)
    loss = jax.jit(make_eval_step(MODEL))(weights_of(params, tables), tokens, weights)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
