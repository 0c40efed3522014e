"""The scaling-law experiment: a CSV of runs, and a small grid that is trained."""

import csv
import json

import jax
import numpy as np
import pytest
from main_job import complaint
from sparse_dataflow.config.model import LinearSpec
from sparse_dataflow.config.presets import SIZES

from experiments import scaling_law_runs
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.models import gpt
from sparse_dataflow.sparsity.scaling_law import ScalingLaw

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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file"),
        ("", "has no column parameters, sparsity, tokens, loss; legal:"),
        ("parameters,sparsity,tokens\n1,0,1\n", "has no column loss"),
        ("parameters,sparsity,tokens,loss\n1,0,1,2\n1,0,1,x\n", "line 3: loss is 'x', which is no"),
        ("parameters,sparsity,tokens,loss\n1,0,1\n", "line 2: loss is None"),
        ("parameters,sparsity,tokens,loss\n1,2,1,2\n", "Run 1 has sparsity 2; legal"),
    ],
)
def test_a_file_that_is_no_table_of_runs_is_refused(tmp_path, text, words):
    path = tmp_path / "runs.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=words):
        scaling_law_runs.read_runs(path)


def test_held_out_runs_are_told_apart(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("parameters,sparsity,tokens,loss,held_out\n1,0,1,2,False\n1,0,2,2,True\n")
    runs, held_out = scaling_law_runs.read_runs(path)
    assert len(runs) == 2 and held_out.tolist() == [False, True]


def test_parameters_are_the_stored_weights_of_projections():
    model = SIZES["pico"].with_linears(LinearSpec("block_sparse", "cyclic", 0.25, 16), ["qkv"])
    blocks = gpt.init(model, jax.random.key(0))["blocks"]
    weights = sum(
        leaf.size for module in blocks.values() for name, leaf in module.items()
        if name in ("kernel", "values")
    )  # fmt: skip
    assert scaling_law_runs.stored_parameters(model) == weights


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
    assert "--batch=4 (saved: 0)" in complaint(
        job.run(*arguments, f"--out={out}", "--batch=4", experiment="sparse_scaling_law")
    )
