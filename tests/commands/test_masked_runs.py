"""Runs of training.objective=masked: resumed, evaluated, continued, and what they are refused."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

import sparse_dataflow as sd
from sparse_dataflow.evaluation import kv_cache, scoring
from sparse_dataflow.evaluation.run_files import read_config
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.interchange import starting_point
from sparse_dataflow.runs.run_config import preset
from sparse_dataflow.runs.variants import variant

TEXTS = [f"Document {number} has a few words about {number % 7}. " * 60 for number in range(40)]
CAUSAL = preset("pico").change(
    model__num_layers=1, model__d_model=32, model__num_heads=2, model__d_ff=64,
    training__sequence=16, training__batch=4, training__steps=4, run__eval_every=2,
    run__checkpoint_every=2, run__twin="no", sparsity__block=8, sparsity__density=0.25,
    model__vocab_size=300,
)  # fmt: skip
MASKED = CAUSAL.change(training__objective="masked", model__mask_documents=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = str(tmp_path_factory.mktemp("masked") / "run")
    return sd.train(MASKED.change(run__out=out), texts=TEXTS)


@pytest.fixture(scope="module")
def model(run):
    return run.model()


def test_a_run_says_the_loss_and_the_accuracy_of_hidden_tokens(run, model):
    rows = [row for row in run.metrics() if row["kind"] in ("eval", "final")]
    assert rows and all(0 <= row["accuracy"] <= 1 and row["loss"] > 0 for row in rows)
    assert model.model.bidirectional and not CAUSAL.model.bidirectional
    # The vocabulary counts the mask token and the end of text.
    assert (model.tokenizer.vocab_size, model.tokenizer.mask_id) == (300, 298)
    assert run.headline.startswith("held-out bits per byte of hidden tokens: sparse ")
    notes = " ".join(json.loads((run.folder / "report.json").read_text())["notes"])
    assert f"sparse says {rows[-1]['accuracy']:.1%} of the hidden tokens" in notes


def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped(run, tmp_path):
    folder = shutil.copytree(run.folder, tmp_path / "run")
    checkpoints = folder / "sparse" / "checkpoints"
    shutil.rmtree(max(checkpoints.iterdir(), key=lambda path: path.name))
    resumed = sd.train(read_config(folder).change(run__out=str(folder)), texts=TEXTS, resume=True)
    losses = [
        {row["step"]: row["loss"] for row in each.metrics() if row["kind"] == kind}
        for each in (run, resumed)
        for kind in ("train", "final")
    ]
    assert losses[:2] == losses[2:]


def naive(model, text, scored):
    """The pseudo-log-likelihood of the last tokens of a text: one is hidden at a time."""
    total, greedy = 0.0, True
    for place in range(len(text) - scored, len(text)):
        hidden = np.array(text, np.int32)
        hidden[place] = model.tokenizer.mask_id
        logits = np.asarray(sd.logits(model, hidden[None])[0, place], np.float64)
        total += logits[text[place]] - np.logaddexp.reduce(logits)
        greedy &= bool(logits.argmax() == text[place])
    return total, greedy


@pytest.mark.parametrize("within", [False, True])
def test_continuations_are_scored_by_their_pseudo_log_likelihood(model, within):
    model = dataclasses.replace(
        model, model=dataclasses.replace(model.model, mask_documents=within)
    )
    rng = np.random.default_rng(0)
    requests = [
        (rng.integers(298, size=before).tolist(), rng.integers(298, size=after).tolist())
        for before, after in [(1, 1), (5, 3), (2, 9), (12, 4), (30, 2)]
    ]
    forward, limits = scoring.single_device_forward(model), scoring.batch_limits(model)
    scores, counts = scoring.pseudo_score(model.tokenizer.mask_id, forward, limits, requests)
    for (before, after), (value, greedy) in zip(requests, scores, strict=True):
        text = [*before, *after][-16:]
        expected = naive(model, text, len(after))
        assert value == pytest.approx(expected[0], rel=1e-4) and greedy == expected[1]
    assert (counts.requests, counts.truncated) == (5, 1)


def test_what_reads_from_left_to_right_is_refused(run, model, tmp_path):
    words = "reads text from left to right, and the model was trained with training.objective=mask"
    for refused in (
        lambda: sd.generate(model, ["a"], max_new_tokens=2),
        lambda: sd.loss(model, np.zeros((1, 4), np.int32)),
        lambda: kv_cache.prepare(model.model, model.params),
        *(
            lambda form=form: sd.save(model, tmp_path / "export", form)
            for form in ("dense", "sparse", "gguf", "program", "adapter")
        ),
        lambda: sd.train(
            CAUSAL.change(training__teacher=str(run.folder), run__out=str(tmp_path / "student")),
            texts=TEXTS,
        ),
    ):
        with pytest.raises(UserError, match=words):
            refused()
    assert not (tmp_path / "export").exists()


def test_a_run_that_begins_with_masked_weights_is_masked(run, tmp_path):
    config = starting_point.run_config(run.folder)
    assert config.training.hides_tokens and not config.model.bidirectional
    assert variant(config, "sparse").model.bidirectional
    with pytest.raises(UserError, match="objective is masked in the initial weights"):
        sd.train(
            config.change(
                training__objective="causal", training__steps=1, run__out=str(tmp_path / "run")
            ),
            texts=TEXTS,
        )


def test_a_finetuned_run_begins_where_the_masked_one_ended(run, tmp_path):
    config = starting_point.run_config(run.folder).change(
        training__steps=1, training__batch=4, run__out=str(tmp_path / "run"), run__twin="no"
    )
    again = sd.train(config, texts=TEXTS)
    first = next(row for row in again.metrics() if row["kind"] == "eval")
    last = [row for row in run.metrics() if row["kind"] == "eval"][-1]
    assert first["step"] == 0 and first["loss"] == pytest.approx(last["loss"], rel=0.2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training__teacher": "DIR"}, "training.teacher=DIR with training.objective=masked"),
        ({"data__tokenizer": "none"}, "data.tokenizer=none with training.objective=masked"),
        ({"evolution__method": "rigl"}, "evolution.method=rigl with training.objective=masked"),
        (
            {"data__loss": "answers", "run__init_from": "DIR"},
            "data.loss=answers with training.objective=masked",
        ),
    ],
)
def test_settings_that_a_masked_run_cannot_have_are_refused_at_once(changes, words):
    with pytest.raises(UserError, match=words):
        MASKED.change(**changes)
