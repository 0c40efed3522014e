"""Experiments and the launcher as the documentation starts them, at their smallest."""

import json
import re
import subprocess
import sys
import textwrap

import pytest
from main_job import PICO, ROOT, TIMEOUT, rows


@pytest.mark.slow
def test_coordinate_check(job, tmp_path):
    small = ("--widths=32,64", "--densities=0.5", "--steps=1", "--scale=pico", "--block=8")
    data = ("--set=model.num_layers=1", f"--corpus={job.corpus}", f"--out={tmp_path}")
    done = job.run(*small, *data, experiment="coordinate_check")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "coordinate_check.json").read_text())["changes"]
    trained = {(row["parametrization"], row["width"], row["density"]) for row in found}
    assert len(trained) == 2 * 2 * 1 and all(len(row["changes"]) == 1 for row in found)
    assert (tmp_path / "coordinate_check.png").exists()


@pytest.mark.slow
def test_features_are_omitted_and_put_back(job, tmp_path):
    size = ("--scale=pico", "--steps=2", "--more=40", "--seeds=1", "--set=model.num_layers=1")
    arms = ("--arms=full,top", f"--corpus={job.corpus}", f"--out={tmp_path / 'out'}")
    done = job.run(*size, *arms, experiment="omit_features")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "omission.json").read_text())["results"]
    flops = {result["arm"]: result["flops"] for result in results}
    assert list(flops) == ["first", "full", "top"]
    assert flops["top"] == pytest.approx(flops["full"], rel=1 / 30)
    rows_of_top = rows(tmp_path / "out" / "top", "seed_0")
    stored = [row["parameters"] for row in rows_of_top if row["kind"] == "evolution"]
    assert stored == sorted(stored) and len(set(stored)) == 5


@pytest.mark.slow
def test_a_training_with_a_dense_end_is_compared(job, tmp_path):
    size = ("--scale=pico", "--block=16", "--steps=4", "--seeds=1", "--set=model.num_layers=1")
    cells = ("--ratios=0.5", "--lengths=0.5,1", "--optimizers=muon", "--arms=mlp_half")
    where = (f"--corpus={job.corpus}", f"--out={tmp_path / 'out'}", "--estimate=125m")
    done = job.run(*size, *cells, *where, experiment="dense_end")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "dense_end.json").read_text())["results"]
    assert [(r["arm"], r["steps"]) for r in results] == [
        ("dense", 2), ("dense", 4), ("mlp_half", 4),
    ]  # fmt: skip
    assert "| mlp_half | 0.5 | 4 |" in (tmp_path / "out" / "dense_end.md").read_text()


@pytest.mark.slow
def test_densities_are_chosen_and_trained(job, tmp_path):
    size = ("--scale=pico", "--block=16", "--steps=2", "--train=1", "--train_steps=2")
    levels = ("--densities=0.25,0.5,1", "--budgets=0.5", "--depth=0.5,1.5", "--zeros=0.5")
    where = (f"--corpus={job.corpus}", f"--out={tmp_path / 'out'}", "--zero_budgets=0.25")
    done = job.run(*size, *levels, *where, experiment="density_search")
    assert done.returncode == 0, done.stderr
    kept = json.loads((tmp_path / "out" / "density_search.json").read_text())
    choices = kept["choices"]["0.5"]
    assert [(r["choice"], r["steps"]) for r in kept["trained"]] == [(name, 2) for name in choices]
    assert "equal density" in choices and len({c["budget"] for c in choices.values()}) > 1
    assert {each["zeros"] for each in kept["zero_choices"]} == {0.25}
    page = (tmp_path / "out" / "density_search.md").read_text()
    assert f"--set sparsity.budget={choices['first']['budget']}" in page
    assert "behind the best of these" in page


@pytest.mark.slow
def test_pipeline_bubble(job, tmp_path):
    size = ("--stages=2", "--micro_batches=2", "--milliseconds=1", "--rounds=1")
    where = (f"--page={tmp_path / 'page.html'}", f"--keep={tmp_path / 'kept'}")
    done = job.run(*size, *where, experiment="pipeline_bubble")
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "kept").iterdir()
    measured = json.loads(path.read_text())["rows"]
    assert {"gpipe", "1f1b", "interleaved", "zero_bubble"} == {row["schedule"] for row in measured}
    assert all(0 <= row["bubble_measured"] < 1 for row in measured)
    assert "<svg" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_a_pattern_in_a_file_of_your_own(job, tmp_path):
    """The one in BUILD.md."""
    page = (ROOT / "BUILD.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (tmp_path / "mine.py").write_text(textwrap.dedent(block))
    flags = ("--pattern=every_third", "--notwin", "--steps=1", f"--corpus={job.corpus}")
    run = job.forks.start(tmp_path / "mine.py", *PICO, *flags, f"--out={tmp_path / 'run'}")
    assert run.wait(TIMEOUT) == 0, run.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["sparsity"]["pattern"] == "every_third"
    assert [row["step"] for row in rows(tmp_path / "run", "sparse") if row["kind"] == "train"] == [
        1
    ]


@pytest.mark.slow
def test_two_processes_are_launched(job, tmp_path):
    """The command of launch/local.md; that fewer go on with it, test_processes proves."""
    folder = tmp_path / "run"
    plan = ("--notwin", "--steps=2", f"--corpus={job.corpus}", f"--out={folder}", "--mesh=data:2")
    words = ["--processes=2", "-m", "experiments.gpt13b_sparse", *PICO, *plan]
    done = subprocess.run(
        [sys.executable, ROOT / "launch" / "local.py", *words],
        cwd=tmp_path,
        env=job.environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout + done.stderr
    assert "process 0 of 2" in told and "process 1 of 2" in told
    assert "[0] " in told and "[1] " in told
    assert [row["step"] for row in rows(folder, "sparse") if row["kind"] == "train"] == [1, 2]
