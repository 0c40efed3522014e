"""Runs that learn from a teacher, and what they refuse."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_dataflow.commands.train import train
from sparse_dataflow.core.batch import Batch
from sparse_dataflow.core.config.model import ModelConfig
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.executors import mesh as meshes
from sparse_dataflow.core.executors import whole
from sparse_dataflow.core.executors.executor import SINGLE_DEVICE
from sparse_dataflow.core.executors.sharded import Sharded
from sparse_dataflow.core.model import gpt
from sparse_dataflow.core.model.stacks import weights_of
from sparse_dataflow.core.training import cost
from sparse_dataflow.core.training.phases import run_flops
from sparse_dataflow.core.training.teacher import Teacher
from sparse_dataflow.evaluation.run_files import read_record
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.monitoring.metrics import read_metrics
from sparse_dataflow.runs.run_config import preset
from sparse_dataflow.runs.variants import variants

pytestmark = pytest.mark.usefixtures("reports_without_continuations")

TEXTS = [f"Document {number} has a few words. " * 60 for number in range(40)]
SMALL = preset("pico").change(
    model__num_layers=1, model__d_model=32, model__num_heads=2, model__d_ff=64,
    training__sequence=16, training__batch=4, training__steps=4, run__eval_every=2,
    run__checkpoint_every=2, run__twin="no", sparsity__block=8, sparsity__density=0.25,
)  # fmt: skip
MODEL = ModelConfig(1, 16, 2, 32, vocab_size=24, max_len=8)
TOKENS = np.random.default_rng(0).integers(0, 24, (4, 9), np.int32)


@pytest.fixture(scope="module")
def teacher(reports_without_continuations, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("teacher") / "run")
    return train(SMALL.dense().change(run__out=out, training__steps=1), texts=TEXTS).folder


def test_a_student_counts_its_teacher_and_resumes_with_no_other(teacher, tmp_path):
    config = SMALL.change(
        run__out=str(tmp_path / "run"),
        training__teacher=str(teacher),
        training__teacher_weight=0.25,
    )
    run = train(config, texts=TEXTS)
    [variant] = variants(config, run.model().tokenizer.vocab_size)
    dense = dataclasses.replace(variant.model, linears={})
    forward = cost.flops_per_token(dense, 16, training=False).total
    plan = variant.model, variant.evolution, variant.training
    flops = [run_flops(*plan), run_flops(*plan, Teacher(dense, {}))]
    assert flops[1] - flops[0] == pytest.approx(4 * 4 * 16 * forward)
    assert "forward passes of the teacher are" in (run.folder / "report.html").read_text()
    record = read_record(run.folder, config)
    assert record.teacher and record.teacher["step"] == 1
    # A resumed run has the same teacher or none.
    moved = teacher.with_name("moved")
    shutil.move(teacher, moved)
    try:
        with pytest.raises(UserError, match="began to learn from weights that cannot be read"):
            train(config, texts=TEXTS, resume=True)
    finally:
        shutil.move(moved, teacher)


def test_other_tokenizers_and_missing_folders_are_refused_before_the_first_step(teacher, tmp_path):
    config = SMALL.change(run__out=str(tmp_path / "run"), training__teacher=str(teacher))
    for changes, words in (
        ({"model__vocab_size": 300}, r"has another tokenizer \(\d+ tokens\) than this run \(300\)"),
        ({"training__teacher": str(tmp_path)}, "neither a run folder nor a Hugging Face directory"),
    ):
        with pytest.raises(UserError, match=words):
            train(config.change(**changes), texts=TEXTS)
    assert not (tmp_path / "run" / "sparse").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"evolution__method": "rigl"}, "legal with it: every other value"),
        (
            {"training__adapter_rank": 2, "run__init_from": "folder", "run__twin": "no"},
            "training.adapter_rank=2 with training.teacher, .*; legal with it: 0",
        ),
        ({"run__twin": "narrow"}, "run.twin=narrow with .*; legal with it: no, yes"),
        (
            {"data__loss": "answers", "run__init_from": "folder"},
            "answers with .* legal with it: all",
        ),
        ({"training__teacher_weight": 0.0}, r"in \(0, 1\]"),
    ],
)
def test_what_has_no_teacher_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        SMALL.change(training__teacher="folder", **changes)


def test_a_twin_has_no_teacher():
    changes = {"training__teacher": "folder", "training__teacher_first": 0.5}
    config = SMALL.change(run__twin="yes", **changes)
    assert [v.training.teacher for v in variants(config)] == ["folder", ""]


def test_first_steps_with_a_teacher_need_one():
    with pytest.raises(UserError, match=r"teacher_first=0.3 needs a training.teacher"):
        SMALL.change(training__teacher_first=0.3)


@given(st.integers(1, 50), st.floats(0.01, 0.99), st.floats(0.1, 1.0))
def test_the_weight_of_a_first_teacher_falls_linearly_to_zero(steps, first, weight):
    training = TrainingConfig(steps, teacher="folder", teacher_weight=weight, teacher_first=first)
    shares = [training.teacher_share(step) for step in range(steps)]
    expected = np.interp(range(steps), [0, first * steps], [1, 0])
    np.testing.assert_allclose(shares, expected, atol=1e-9)
    whole_training = dataclasses.replace(training, teacher_first=0.0)
    assert {whole_training.teacher_share(step) for step in range(steps)} == {1.0}


def test_a_teacher_without_weight_is_not_run_and_leaves_the_loss_of_the_next_tokens():
    params = gpt.init(MODEL, jax.random.key(0))
    training = TrainingConfig(4, 4, 8, teacher="folder", teacher_weight=0.5)
    batch = Batch.from_windows(TOKENS).weighted()
    teach = Teacher(MODEL, gpt.init(MODEL, jax.random.key(1))).program(
        MODEL, SINGLE_DEVICE, batch, training
    )
    first = teach(batch, 0.5)
    assert first.teacher[1] == 0.25
    other = dataclasses.replace(batch, tokens=batch.tokens[::-1].copy())
    last = teach(other, 0.0)
    assert last.teacher_hidden is first.teacher_hidden  # Those of the batch before.
    losses = [
        whole.loss_and_gradients(MODEL, params, (), each)[0]["loss"].number()
        for each in (last, other)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert not np.array_equal(teach(other, 0.1).teacher_hidden, first.teacher_hidden)


def test_a_run_has_the_teacher_in_its_first_steps_and_counts_the_flops_of_these(teacher, tmp_path):
    """The loss of a step without weight is that of the next tokens, after equal steps before."""
    changes = {"training__teacher": str(teacher), "training__teacher_first": 0.25}
    config = SMALL.change(run__out=str(tmp_path / "first"), **changes)
    runs = {"first": train(config, texts=TEXTS)}
    plain = SMALL.change(run__out=str(tmp_path / "plain"))
    runs["plain"] = train(plain, texts=TEXTS)
    longer = config.change(run__out=str(tmp_path / "longer"), training__teacher_first=0.0)
    runs["longer"] = train(longer, texts=TEXTS)
    losses = {
        name: [
            row["loss"]
            for row in read_metrics(run.folder / "sparse" / "metrics.jsonl")
            if row["kind"] == "train"
        ]
        for name, run in runs.items()
    }
    # The weight is 1/2 in the first step and 0 in the others; the first update is nearly equal.
    assert losses["first"][0] == losses["longer"][0] != losses["plain"][0]
    assert losses["first"][1] == pytest.approx(losses["plain"][1], rel=1e-2)
    [variant] = variants(config, runs["first"].model().tokenizer.vocab_size)
    dense = dataclasses.replace(variant.model, linears={})
    plan = variant.model, variant.evolution
    forward = Teacher(dense, {})
    extra = [
        run_flops(*plan, v.training, forward) - run_flops(*plan, v.training)
        for v in (variant, *variants(longer, variant.model.vocab_size))
    ]
    tokens = config.training.steps * config.training.batch * config.training.sequence
    head = 2 * dense.d_model * dense.vocab_size * tokens
    assert extra[0] == pytest.approx(head + (extra[1] - head) / 4)


@pytest.mark.slow
def test_a_student_of_itself_has_no_divergence():
    """The loss is then (1 - weight) times that of the next tokens, whatever the micro-batches."""
    params = gpt.init(MODEL, jax.random.key(0))
    plain = float(
        whole.loss(
            MODEL,
            weights_of(MODEL, params, {}),
            Batch.from_windows(TOKENS, np.full((4, 8), 1 / 32, np.float32)),
        )
    )
    mesh = meshes.make(meshes.parse("fsdp:1", 1), jax.devices()[:1])
    gradients = []
    for executor, micro_batches in ((SINGLE_DEVICE, 2), (Sharded(mesh), 1)):
        training = TrainingConfig(1, 4, 8, micro_batches, teacher="folder", teacher_weight=0.25)
        batch = Batch.from_windows(TOKENS)
        batch = Teacher(MODEL, params).program(MODEL, executor, batch, training)(batch, 1.0)
        how = whole.Accumulation(micro_batches)
        loss, gradient = jax.jit(executor.loss_and_gradients, static_argnums=(0, 4))(
            MODEL, params, (), batch, how
        )
        assert loss["loss"].number() == pytest.approx(0.75 * plain, rel=1e-5)
        gradients.append(gradient)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), *gradients)
