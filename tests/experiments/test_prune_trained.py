"""The study of recoveries: what is left of a trained model, and at which cost."""

import json

import jax
import numpy as np
import pytest
from exit_status import exit_status

from experiments import prune_trained
from experiments.studies.serving_cost import (
    arms,
    inputs,
    reconstruction,
    recovery,
    runs,
    study,
    training,
)
from experiments.studies.serving_cost.text import Text
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.executors.whole import Batch
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.stacks import weights_of

WIDE = ModelConfig(
    2, 16, 4, 32, vocab_size=40, max_len=8, norm="rmsnorm", activation="relu", biases=()
)
NARROW = ModelConfig(
    2, 12, 3, 24, vocab_size=40, max_len=8, norm="rmsnorm", activation="relu", biases=()
)


def loss(model, params, tokens):
    even = np.full(tokens[:, 1:].shape, 1 / tokens[:, 1:].size, np.float32)
    return float(whole.loss(model, weights_of(params), Batch(tokens, even)))


@pytest.mark.slow
def test_the_narrowed_model_is_the_wide_one_without_features_that_are_zero():
    rng = np.random.default_rng(0)
    params = jax.tree.map(np.array, gpt.init(WIDE, jax.random.key(0)))
    channels = np.sort(rng.permutation(16)[:12])
    off = np.setdiff1d(np.arange(16), channels)
    for leaf in params["embed"].values():
        leaf[:, off] = 0
    for layer in range(2):
        head, hidden = rng.integers(4), rng.permutation(32)[:8]
        for name in ("attn_out", "mlp_out"):
            params["blocks"][name]["kernel"][layer][:, off] = 0
        params["blocks"]["mlp_in"]["kernel"][layer][:, hidden] = 0
        params["blocks"]["qkv"]["kernel"][layer][:, 12 * head : 12 * (head + 1)] = 0
    tokens = rng.integers(0, 40, (3, 9)).astype(np.int32)
    narrow = recovery.narrowed(WIDE, NARROW, params, tokens[:, :-1])
    shapes = jax.eval_shape(lambda: gpt.init(NARROW, jax.random.key(0)))
    assert jax.tree.map(np.shape, narrow) == jax.tree.map(lambda leaf: leaf.shape, shapes)
    assert loss(NARROW, narrow, tokens) == pytest.approx(loss(WIDE, params, tokens), abs=1e-4)


def test_a_fitted_narrow_model_has_the_residual_stream_of_the_wide_one():
    rng = np.random.default_rng(0)
    params = jax.tree.map(np.array, gpt.init(WIDE, jax.random.key(0)))
    tokens = rng.integers(0, 40, (64, 8)).astype(np.int32)
    wanted = reconstruction.given(WIDE, params, tokens)["mlp_out"][-1]
    squares = inputs.mean_squares(WIDE, params, tokens)
    channels = np.sort(np.argsort(-(squares["qkv"] + squares["mlp_in"]).sum(0))[:12])

    def error(rebuilt):
        narrow = recovery.narrowed(WIDE, NARROW, params, tokens, rebuilt)
        given = reconstruction.given(NARROW, narrow, tokens)["mlp_out"][-1]
        return np.square(given - wanted[..., channels]).mean()

    assert error(rebuilt=True) < 0.6 * error(rebuilt=False)


@pytest.mark.parametrize("served", recovery.SERVED)
@pytest.mark.parametrize("method", recovery.METHODS)
def test_every_method_serves_and_trains_for_the_same_flops(method, served):
    options = prune_trained.Options()
    rival = study.model_of(options, *recovery.SERVED[served])
    wide = study.model_of(options, *recovery.TRAINED)
    arm = recovery.arm_of(method, rival)
    model = arms.served_model(rival, arm)
    flops = sum(arms.served_sections(rival).values())
    assert sum(arms.served_sections(model).values()) == pytest.approx(flops, rel=1e-9)
    assert arms.shape(rival, arm) == (wide if arm.pruned else rival)
    course = arms.course(rival, arm, 1000, recovery.CHUNK, 32, wide if arm.teacher else None)
    assert course.flops == pytest.approx(1000 * 32 * 32 * 3 * flops, rel=0.01)
    if arm.teacher:
        teacher_flops = sum(arms.served_sections(wide).values())
        assert course.steps * (3 * flops + teacher_flops) * 1024 <= 1.01 * course.flops


@pytest.mark.slow
def test_a_training_begins_with_the_given_weights():
    ids = np.tile(np.arange(40, dtype=np.uint8), 400)
    corpus = Text({name: ids for name in ("train", "tuning", "held_out")}, "", "")
    recipe = training.Recipe("muon", 1e-2, 1.0, "linear", 0.05, 4)
    first, params = training.train(NARROW, arms.Arm(), recipe, 60, 0, corpus)
    still = training.Recipe("muon", 0.0, 1.0, "linear", 0.05, 4)
    arm = arms.Arm(teacher=0.5)
    begin = training.Trained(params, (NARROW, params))
    again, _ = training.train(NARROW, arm, still, 10, 0, corpus, begin, 2)
    assert again["held_out"] == pytest.approx(first["held_out"], rel=1e-6)


@pytest.mark.slow
def test_a_small_study_goes_on(tmp_path, capsys):
    small = (
        "--length=1", "--batch=64", "--recoveries=20", "--trials=1", "--served=1/4",
        f"--out={tmp_path}",
    )  # fmt: skip

    def ended(*flags):
        return exit_status(prune_trained, *small, *flags)

    assert ended("--seeds=1", "--methods=narrow_taught") == 0
    first = (tmp_path / runs.LINES).read_text()
    assert ended("--seeds=1", "--methods=narrow_taught,blocks_taught") == 0
    text = (tmp_path / runs.LINES).read_text()
    assert text.startswith(first)
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["seed"] for line in lines] == [0, 0]
    assert len({line["served_flops"] for line in lines}) == 1
    assert lines[0]["trained"] == lines[1]["trained"]
    assert "| 1/4 | blocks_taught |" in (tmp_path / "recovery.md").read_text()
    assert ended("--learning_rate=1") == 2
    assert "other settings" in capsys.readouterr().err
    jax.clear_caches()
