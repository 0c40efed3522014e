"""The main job end to end: what it leaves in the run folder, and that its numbers agree."""

import json
import struct

import pytest
from main_job import arrays, assert_same_results, checkpoint_steps, rows

from sparse_dataflow.core.training import cost
from sparse_dataflow.data.tokenizer import Tokenizer
from sparse_dataflow.evaluation.run_files import read_config, read_record, read_variants
from sparse_dataflow.reporting.report_data import ReportData
from sparse_dataflow.runs.run_config import SIZES, preset

PROJECTIONS = SIZES["nano"].projections

TRAIN_KEYS = {
    "kind", "step", "tokens", "seconds", "loss", "learning_rate", "gradient_norm",
    "tokens_per_second", "mfu",
}  # fmt: skip
EVAL_KEYS = {"kind", "step", "tokens", "seconds", "loss", "bits_per_byte", "bits_per_byte_error"}


def record_of(folder):
    return read_record(folder, read_config(folder))


def report_of(folder):
    return ReportData.from_json(json.loads((folder / "report.json").read_text()))


def test_the_run_folder_says_what_was_run_and_with_what(undisturbed, job):
    config, record = read_config(undisturbed), record_of(undisturbed)
    assert record.experiment == "gpt13b_sparse"
    assert record.command[0] == "python -m experiments.gpt13b_sparse"
    assert "--density=0.25" in record.command and record.date.startswith("20")
    assert {"python", "jax", "jaxlib", "sparse_dataflow"} <= record.versions.keys()
    expected = preset("pico").change(
        sparsity__density=0.25,
        sparsity__block=16,
        training__steps=12,
        data__corpus=str(job.corpus),
        run__eval_every=6,
        run__checkpoint_every=3,
        run__out=config.run.out,
    )
    # The planner has settled what the preset leaves to it.
    assert config == expected.without_auto()
    assert record.corpus == str(job.corpus)
    tokenizer = Tokenizer.load(undisturbed / "tokenizer.json")
    assert tokenizer.content_hash == record.tokenizer
    models = read_variants(config, record)
    assert list(models) == ["sparse", "dense"]
    for name, variant in models.items():
        assert bool(variant.model.sparse_projections) == (name == "sparse")
        assert variant.model.vocab_size == tokenizer.vocab_size
        assert variant.training.steps == 12


@pytest.mark.parametrize("variant", ["sparse", "dense"])
def test_metrics_hold_every_step_once(undisturbed, variant):
    found = rows(undisturbed, variant)
    train = [row for row in found if row["kind"] == "train"]
    assert [row["step"] for row in train] == list(range(1, 13))
    assert all(row.keys() == TRAIN_KEYS for row in train)
    evaluations = [row for row in found if row["kind"] != "train"]
    assert all(row.keys() == EVAL_KEYS for row in evaluations)
    assert [(r["kind"], r["step"]) for r in evaluations] == [
        ("eval", 6),
        ("eval", 12),
        ("final", 12),
    ]
    assert all(row["tokens"] == row["step"] * 8 * 64 for row in found)
    assert train[-1]["loss"] < train[0]["loss"] - 0.5
    assert 0 < evaluations[-1]["bits_per_byte"] < evaluations[0]["bits_per_byte"]
    clock = [row["seconds"] for row in train]
    assert clock == sorted(clock) and clock[0] > 0
    assert all(row["tokens_per_second"] > 0 and 0 < row["mfu"] for row in train)
    assert checkpoint_steps(undisturbed, variant) == [6, 9, 12]


@pytest.mark.parametrize("variant", ["sparse", "dense"])
def test_tensorboard_holds_the_same_numbers(undisturbed, variant):
    from tensorboardX.proto.event_pb2 import Event

    (path,) = (undisturbed / variant / "tensorboard").iterdir()
    data, losses = path.read_bytes(), {}
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        losses |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
    for row in rows(undisturbed, variant):
        assert losses[f"{row['kind']}/loss", row["step"]] == pytest.approx(row["loss"])


def test_the_report_says_what_the_metrics_say(undisturbed):
    report = report_of(undisturbed)
    models = read_variants(read_config(undisturbed), record_of(undisturbed))
    assert [v.name for v in report.variants] == ["sparse", "dense"]
    for variant in report.variants:
        found = rows(undisturbed, variant.name)
        final = found[-1]
        assert (variant.loss, variant.bits_per_byte) == (final["loss"], final["bits_per_byte"])
        assert (variant.steps, variant.tokens) == (12, 12 * 8 * 64)
        assert variant.train_seconds == final["seconds"]
        speeds = [row["tokens_per_second"] for row in found if row["kind"] == "train"]
        assert min(speeds) <= variant.tokens_per_second <= max(speeds)
        assert variant.step_seconds == pytest.approx(8 * 64 / variant.tokens_per_second)
        model = models[variant.name].model
        assert variant.stored_parameters == cost.parameter_count(model)
        assert sum(variant.memory.values()) == variant.training_bytes
        assert variant.history == found
        saved = arrays(undisturbed, variant.name, 12)
        weights = [name for name in saved if not name.startswith(("moments", "step", "key"))]
        assert variant.weight_bytes == sum(saved[name].nbytes for name in weights)
        assert 0 < variant.token_seconds < variant.train_seconds
    sparse, dense = report.variants
    assert sparse.stored_parameters < dense.stored_parameters
    assert 1 < report.flop_ceiling == dense.flops_per_token / sparse.flops_per_token
    assert 0 < report.projection_share < 1
    drawn = {layout.projection for layout in report.layouts if layout.balanced}
    assert drawn == set(PROJECTIONS)
    assert len(report.continuations) == 10
    assert all(c.prompt and set(c.by_variant) == {"sparse", "dense"} for c in report.continuations)


def test_the_page_needs_no_network(undisturbed):
    page = (undisturbed / "report.html").read_text()
    assert "gpt13b_sparse" in page and "sparse-dataflow train" in page
    for reference in ('src="http', 'href="http', "@import", "url(http"):
        assert reference not in page
    for variant in report_of(undisturbed).variants:
        assert f"{variant.bits_per_byte:.3f}" in page


@pytest.mark.slow
def test_the_dense_experiment_alone_keeps_its_plan(job, undisturbed, tmp_path):
    """The schedule that was planned from --minutes stays, however fast the machine is later."""
    folder = tmp_path / "run"
    flags = ("--scale=pico", "--minutes=0.02", f"--corpus={job.corpus}", f"--out={folder}")
    stop = (r"dense/checkpoints/[1-9]\d*\.saving", 1, "SIGINT")
    done = job.run(*flags, experiment="gpt13b_dense", events=[stop])
    assert done.returncode == 0, done.stderr
    steps = record_of(folder).steps["dense"]
    assert f"{steps} steps planned" in done.stderr and f"--resume={folder}" in done.stderr
    assert steps > 1
    done = job.resume(folder, experiment="gpt13b_dense")
    assert done.returncode == 0 and "planned" not in done.stderr, done.stderr
    assert "relay" not in done.stderr, done.stderr
    train = [row for row in rows(folder, "dense") if row["kind"] == "train"]
    assert [row["step"] for row in train] == list(range(1, len(train) + 1))
    assert record_of(folder).steps["dense"] == steps
    assert [v.name for v in report_of(folder).variants] == ["dense"]
    assert not (folder / "sparse").exists() and (folder / "report.html").exists()
    assert report_of(folder).flop_ceiling is None


@pytest.mark.slow
def test_the_sparse_model_without_its_twin_is_the_same_model(job, undisturbed, tmp_path):
    folder = tmp_path / "run"
    done = job.new(folder, "--notwin")
    assert done.returncode == 0, done.stderr
    assert not (folder / "dense").exists() and list(record_of(folder).steps) == ["sparse"]
    assert [v.name for v in report_of(folder).variants] == ["sparse"]
    losses = [[row["loss"] for row in rows(path, "sparse")] for path in (folder, undisturbed)]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_finished_run_that_is_resumed_only_reports_again(job, copy, undisturbed):
    (copy / "report.html").unlink()
    done = job.resume(copy)
    assert done.returncode == 0, done.stderr
    assert_same_results(copy, undisturbed)
