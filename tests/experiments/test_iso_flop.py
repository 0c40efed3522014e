"""A small iso-FLOP study is stopped and goes on."""

import json
import shutil

import pytest

from sparse_dataflow.files.errors import TEMPORARY


@pytest.mark.slow
def test_a_small_study_goes_on_with_the_same_list(job, tmp_path):
    arguments = ["--scale=pico", "--budgets=1", "--densities=0.25", "--equal=flops", "--steps=4"]
    arguments += [
        "--set=model.num_layers=1",
        "--trials=1",
        "--seeds=2",
        "--headline_seeds=2",
        "--optimizers=adamw",
    ]
    arguments += [f"--corpus={job.corpus}", f"--out={tmp_path / 's'}"]
    start = lambda **options: job.run(*arguments, experiment="iso_flop", **options)  # noqa: E731
    stop = (r"dense/measure/rate_1/seed_1/checkpoints/\d+\.saving", 1, "SIGTERM")
    done = start(events=[stop])
    assert done.returncode == TEMPORARY and "the same command goes on" in done.stderr, done.stderr
    lines = (tmp_path / "s" / "runs.jsonl").read_text().splitlines()
    before = [json.loads(line) for line in lines]
    assert [line["role"] for line in before] == ["tune", "tune", "measure"]
    done = start()
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "s" / "runs.jsonl").read_text().splitlines()
    after = [json.loads(line) for line in lines]
    assert after[:3] == before and len(after) == 6
    assert [line["seed"] for line in after if line["role"] == "measure"] == [0, 1, 0, 1]
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

    # Its small files are enough to go on with: here two seeds more, and no run again.
    shutil.rmtree(tmp_path / "s" / "steps_4")
    done = job.run(*arguments, "--headline_seeds=3", experiment="iso_flop")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "s" / "runs.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines][:6] == after and len(lines) == 8
    assert [path.name for path in (tmp_path / "s").rglob("seed_*")] == ["seed_2", "seed_2"]
