"""When which model is trained, and at which learning rate."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_dataflow.models.sizes import LinearSpec, ModelConfig
from sparse_dataflow.sparsity.evolution import EvolutionConfig
from sparse_dataflow.training.optimizer import TrainingConfig, learning_rate_schedule
from sparse_dataflow.training.phases import learning_rate, phases

SPARSE = LinearSpec("block_sparse", "cyclic", density=0.25, block=4)
MODEL = ModelConfig(2, 32, 2, 64, vocab_size=40, max_len=8).with_linears(SPARSE)


def rates(training, method="sparse_to_dense", **how):
    found = phases(MODEL, EvolutionConfig(method, **how), training.steps)
    return found, [learning_rate(training, found, step) for step in range(training.steps)]


@settings(max_examples=10)
@given(
    st.integers(20, 200), st.sampled_from([0.3, 0.5, 0.9]), st.sampled_from([(), ("qkv",)]),
)  # fmt: skip
def test_the_dense_stages_have_the_decay_to_themselves(steps, at, first):
    training = TrainingConfig(steps, 4, 8, learning_rate=0.01, warmup=0.1)
    found, schedule = rates(training, at=at, first=first)
    begun, warm = found[1].start, round(0.1 * steps)
    assert schedule[:warm] == sorted(schedule[:warm]) and schedule[0] < 0.01
    assert schedule[warm : begun + 1] == pytest.approx([0.01] * (begun + 1 - warm))
    assert schedule[begun:] == sorted(schedule[begun:])[::-1]
    left = steps - max(begun, warm)
    last = 0.1 + 0.45 * (1 + math.cos(math.pi * (left - 1) / left))
    assert schedule[-1] == pytest.approx(0.01 * last)


@settings(max_examples=10)
@given(st.integers(20, 200), st.sampled_from(["set", "gradual"]))
def test_other_methods_keep_one_cosine(steps, method):
    training = TrainingConfig(steps, 4, 8, learning_rate=0.01)
    schedule = learning_rate_schedule(training)
    assert rates(training, method)[1] == [schedule(step) for step in range(steps)]
