"""The scaling-law experiment: a CSV of runs, and a small grid that is trained."""

import csv
import json

import numpy as np
import pytest
from main_job import complaint

from experiments.studies.fitted_law import ScalingLaw

LAW = ScalingLaw(16.8, 0.722, 45.0, 0.245, 6.9e8, 0.203, 0.651)


@pytest.fixture
def runs_csv(tmp_path):
    path = tmp_path / "mine.csv"
    axes = np.geomspace(3e5, 3e7, 3), [0.0, 0.5, 0.875], np.geomspace(1e6, 1e8, 3)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["loss", "note", "tokens", "sparsity", "parameters"])
        for n, s, d in zip(*(axis.ravel() for axis in np.meshgrid(*axes))):
            writer.writerow([float(LAW.loss(n, s, d)), "mine", d, s, n])
    return path


@pytest.mark.slow
def test_any_csv_of_runs_is_fitted(job, runs_csv, tmp_path):
    out = tmp_path / "law"
    done = job.run(
        f"--runs={runs_csv}", f"--out={out}", "--rounds=10", experiment="sparse_scaling_law"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((out / "law.json").read_text())
    assert found["runs"] == 27 and found["residuals"]["worst"] < 0.01
    constants = found["constants"]
    assert constants["b_n"]["value"] == pytest.approx(0.245, rel=0.1)
    assert all(c["low"] <= c["high"] for c in constants.values())
    gain = found["dense_equivalent"]["0.875"]
    assert gain["value"] == pytest.approx(LAW.dense_equivalent(0.875), rel=0.05)
    assert "27 runs; residuals" in (out / "law.md").read_text()
    assert (out / "law.png").read_bytes().startswith(b"\x89PNG")


def test_a_grid_of_too_few_runs_is_refused_before_it_trains(job, tmp_path):
    """Eight trainings, of which two are held out."""
    arguments = ["--scale=pico", "--block=16", "--widths=64,128", "--densities=1,0.25"]
    arguments += ["--lengths=3,6", f"--corpus={job.corpus}", f"--out={tmp_path / 'grid'}"]
    done = job.run(*arguments, experiment="sparse_scaling_law")
    assert "6 runs cannot fit 7 constants; legal: 8 or more" in complaint(done)
    assert not (tmp_path / "grid").exists()


@pytest.mark.nightly
def test_a_small_grid_is_trained_predicted_and_gone_on_with(job, tmp_path):
    out = tmp_path / "grid"
    arguments = ["--scale=pico", "--block=16", "--widths=64,128", "--densities=1,0.25"]
    arguments += ["--lengths=3,6", "--seeds=2", "--rounds=10", f"--corpus={job.corpus}"]
    done = job.run(*arguments, f"--out={out}", experiment="sparse_scaling_law")
    assert done.returncode == 0, done.stderr
    with (out / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16 and sum(row["held_out"] == "True" for row in rows) == 4
    assert len({row["loss"] for row in rows}) == 16
    predictions = json.loads((out / "predictions.json").read_text())
    found = json.loads((out / "law.json").read_text())
    assert found["runs"] == 12 and len(predictions) == 2
    for before, after in zip(predictions, found["predictions"]):
        assert "loss" not in before and before["predicted"] == after["predicted"]
        assert len(after["losses"]) == 2 and after["loss"] == np.mean(after["losses"])
    refit = [f"--runs={out / 'runs.csv'}", "--rounds=10", f"--out={tmp_path / 'again'}"]
    assert job.run(*refit, experiment="sparse_scaling_law").returncode == 0
    again = json.loads((tmp_path / "again" / "law.json").read_text())
    for kept in ("constants", "predictions", "residuals"):
        assert again[kept] == found[kept]
    again = job.run(*arguments, f"--out={out}", experiment="sparse_scaling_law")
    assert again.returncode == 0 and "steps into" not in again.stdout + again.stderr
    assert "--batch=4 (saved: 8)" in complaint(
        job.run(*arguments, f"--out={out}", "--batch=4", experiment="sparse_scaling_law")
    )
