"""A small iso-FLOP study is stopped and goes on."""

import json
import shutil

import pytest

from sparse_dataflow.files.errors import TEMPORARY


@pytest.mark.slow
def test_a_small_study_goes_on_with_the_same_list(job, tmp_path):
    arguments = ["--scale=pico", "--budgets=1", "--densities=0.5", "--equal=flops", "--steps=4"]
    arguments += [
        "--set=model.num_layers=1",
        "--trials=1",
        "--pattern=shuffle",
        "--block=4",
        "--seeds=1",
        "--optimizers=adamw",
    ]
    arguments += [f"--corpus={job.corpus}", f"--out={tmp_path / 's'}"]
    start = lambda *more, **how: job.run(*arguments, *more, experiment="iso_flop", **how)  # noqa: E731
    stop = (r"0.5/measure/rate_1/seed_0/checkpoints/\d+\.saving", 1, "SIGTERM")
    done = start("--headline_seeds=1", events=[stop])
    assert done.returncode == TEMPORARY and "the same command goes on" in done.stderr, done.stderr
    lines = (tmp_path / "s" / "runs.jsonl").read_text().splitlines()
    before = [json.loads(line) for line in lines]
    assert [line["role"] for line in before] == ["tune", "tune", "measure"]
    # Finished runs are in that small file; a run that was stopped goes on in its folder.  The same
    # command may ask for a seed more.
    shutil.rmtree(tmp_path / "s" / "steps_4/budget_1/adamw/dense/tune")
    shutil.rmtree(tmp_path / "s" / "steps_4/budget_1/adamw/flops_density_0.5/tune")
    done = start("--headline_seeds=2")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "s" / "runs.jsonl").read_text().splitlines()
    after = [json.loads(line) for line in lines]
    assert after[:3] == before and len(after) == 6
    measured = [line["seed"] for line in after if line["role"] == "measure"]
    assert measured == [0, 0, 1, 1]
    assert not list((tmp_path / "s").rglob("tune"))
    assert all(line["result"]["steps"] == 4 for line in after)
    assert not list((tmp_path / "s").rglob("checkpoints"))
    result = json.loads((tmp_path / "s" / "iso_flop.json").read_text())
    (curve,) = result["curves"]
    dense, sparse = curve["arms"]
    assert sparse["to_dense"]["low"] < sparse["to_dense"]["difference"]
    assert result["splits"]["held_out"]["bytes"] > result["splits"]["tuning"]["bytes"] > 0
    flops = [arm["flops_per_token"] for arm in result["arms"]]
    assert flops[1] == pytest.approx(flops[0], rel=0.025)
    assert dense["time_to_quality"]["tokens"] == pytest.approx(4 * 8 * 64)
    assert (
        "## Equal FLOPs, budget 1, 4 steps, adamw" in (tmp_path / "s" / "iso_flop.md").read_text()
    )
    assert (tmp_path / "s" / "iso_flop.png").exists()
