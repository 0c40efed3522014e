"""Runs whose layouts or model change: killed and gone on with, they end at the same bits."""

import json
import signal

import pytest
from main_job import assert_same_results, checkpoint_steps, rows

from sparse_dataflow.core.config.projections import LinearSpec
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.core.training import cost
from sparse_dataflow.evaluation.run_files import read_config, read_record, read_variants
from sparse_dataflow.planner import plan_memory

METHODS = {
    "rigl": ("--evolution=rigl", "--set=evolution.every=2", "--notwin"),
    # The checkpoint of step 6 is the last sparse one.
    "sparse_to_dense": ("--evolution=sparse_to_dense", "--set=evolution.at=0.5", "--notwin"),
}


def killed(done):
    assert done.returncode == -signal.SIGKILL, (done.returncode, done.stderr)


def saving(step):
    return (rf"sparse/checkpoints/{step}\.saving", 1, "SIGKILL")


@pytest.mark.slow
@pytest.mark.parametrize(
    # Every day test_faults kills a run of rigl, over two processes.
    "method",
    [pytest.param("rigl", marks=pytest.mark.nightly), "sparse_to_dense"],
)
def test_kills_around_a_change(job, refused, tmp_path, method):
    folder, whole = tmp_path / "run", tmp_path / "whole"
    done = job.new(whole, *METHODS[method])
    assert done.returncode == 0, done.stderr
    killed(job.new(folder, *METHODS[method], events=[saving(6)]))
    assert checkpoint_steps(folder, "sparse") == [3]
    killed(job.resume(folder, events=[saving(9)]))
    assert checkpoint_steps(folder, "sparse") == [3, 6]
    error = refused(f"--resume={folder}", "--evolution=set")
    assert f"--evolution=set (saved: {method})" in error
    done = job.resume(folder)
    assert done.returncode == 0 and "resumes after step 6 of 12" in done.stderr, done.stderr
    assert_same_results(folder, whole)
    found = rows(whole, "sparse")
    changes = [row["step"] - 1 for row in found if row["kind"] == "evolution"]
    assert changes == {"rigl": [2, 4, 6, 8], "sparse_to_dense": [6]}[method]
    check_report(whole, method)


def check_report(folder, method):
    """Its FLOPs are those of what was trained, and its memory the most that was needed."""
    report = json.loads((folder / "report.json").read_text())
    config = read_config(folder)
    assert config.evolution.method == method
    sparse = read_variants(config, read_record(folder, config))["sparse"].model
    (variant,) = report["variants"]
    dense = sparse.with_linears(LinearSpec())
    dense_flops = cost.flops_per_token(dense, 64).total
    sparse_flops = cost.flops_per_token(sparse, 64).total
    if method == "sparse_to_dense":
        assert variant["flops_per_token"] == pytest.approx((dense_flops + sparse_flops) / 2)
        assert variant["stored_parameters"] == cost.parameter_count(dense)
        training = TrainingConfig(batch=8, sequence=64)
        assert variant["training_bytes"] == plan_memory.training_bytes(dense, training).total
    else:
        assert sparse_flops < variant["flops_per_token"] < dense_flops
        assert variant["stored_parameters"] == cost.parameter_count(sparse)
    assert report["flop_ceiling"] == pytest.approx(dense_flops / variant["flops_per_token"])
    assert len(report["layouts"]) == 8 and all(lay["balanced"] for lay in report["layouts"])
    assert any(f"sparse: {method}" in note for note in report["notes"])


@pytest.mark.slow
def test_minutes_are_planned_from_both_phases(job, tmp_path):
    folder = tmp_path / "run"
    flags = ("--scale=pico", "--block=16", "--density=0.25", "--minutes=0.05", "--notwin")
    evolution = ("--evolution=sparse_to_dense", f"--corpus={job.corpus}", f"--out={folder}")
    done = job.run(*flags, *evolution)
    assert done.returncode == 0, done.stderr
    steps = read_record(folder, read_config(folder)).steps["sparse"]
    assert " then " in done.stderr and f"{steps} steps planned" in done.stderr
    (change,) = [row for row in rows(folder, "sparse") if row["kind"] == "evolution"]
    assert change["step"] - 1 == round(0.7 * steps)
