"""Seconds of a step by section: all sections, none negative, the state unchanged."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from marks import some

from experiments.benchmarks import section_times
from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.training.step import initial_state
from sparse_dataflow.runs.run_config import SIZES

IN_ORDER = [
    "embed",
    "qkv",
    "attention",
    "attn_out",
    "mlp_in",
    "mlp_out",
    "norms and GELU",
    "head and loss",
    "optimizer",
    "other",
]
TRAINING = TrainingConfig(steps=1, batch=4, sequence=16, micro_batches=2, learning_rate=1e-3)
SPARSE = SIZES["pico"].with_linears(LinearSpec("block_sparse", "monarch", 1 / 4, block=16))


DEPTH = dataclasses.replace(SPARSE, density_by_depth=(2.0, 1.0))


@pytest.mark.parametrize(
    "model", some({"dense": SIZES["pico"], "sparse": SPARSE, "by depth": DEPTH}, "by depth")
)
def test_all_sections_add_up_to_the_step(model):
    state = initial_state(model, TRAINING)._replace(key=np.zeros(2, np.uint32))
    before = jax.tree.map(np.array, state)
    seconds = section_times.section_seconds(model, TRAINING, state, step_seconds=1e3)
    assert list(seconds) == IN_ORDER
    assert all(math.isfinite(s) and s > 0 for s in seconds.values())
    assert sum(seconds.values()) == pytest.approx(1e3)
    jax.tree.map(np.testing.assert_array_equal, before, state)


@pytest.mark.parametrize("model", some({"dense": SIZES["pico"], "by depth": DEPTH}, "dense"))
def test_sections_count_every_layer_and_micro_batch(monkeypatch, model):
    """Every timing is one second."""
    monkeypatch.setattr(section_times, "_median", lambda run: 1.0)
    seconds = section_times.section_seconds(model, TRAINING, initial_state(model, TRAINING), 5.0)
    every_layer = TRAINING.micro_batches * model.num_layers
    once = {"embed": TRAINING.micro_batches, "head and loss": TRAINING.micro_batches}
    expected = dict.fromkeys(IN_ORDER, every_layer) | once | {"optimizer": 1, "other": 0}
    assert seconds == expected  # The sections exceed the step, and "other" is not negative.
