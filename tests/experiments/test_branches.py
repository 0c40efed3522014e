"""Several ends of one plateau: each is the run that had its settings from the beginning."""

import json

import pytest
from main_job import assert_same_results

pytestmark = pytest.mark.slow  # Every run is a process of its own.

WSD = ("--set=training.schedule=wsd", "--twin=yes")
LEVEL = (*WSD, "--set=training.decay=0.25", "--set=training.warmup=0.25")


@pytest.fixture(scope="module")
def plateau(job, tmp_path_factory):
    """A run of 12 steps that falls from step 9; it keeps the checkpoints of 6, 9 and 12.

    The last line of its metrics is torn, as after a kill.
    """
    folder = tmp_path_factory.mktemp("plateau") / "run"
    done = job.new(folder, *LEVEL)
    assert done.returncode == 0, done.stderr
    with (folder / "sparse" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind": "train", "step": 9, "lo')
    return folder


@pytest.mark.parametrize(
    ("steps", "decay", "begins"), [(18, 0.5, 9), (10, 0.2, 6)], ids=["longer", "shorter"]
)
def test_an_end_has_the_bits_of_a_run_with_its_settings(
    job, plateau, tmp_path, steps, decay, begins
):
    before = sorted(p.name for p in plateau.rglob("*"))
    ends = f"--steps={steps}", f"--set=training.decay={decay}"
    branch = job.run(f"--resume={plateau}", f"--out={tmp_path / 'branch'}", *ends)
    assert branch.returncode == 0, branch.stderr
    assert f"resumes after step {begins} of {steps}" in branch.stdout + branch.stderr
    assert sorted(p.name for p in plateau.rglob("*")) == before
    whole = job.new(tmp_path / "whole", *LEVEL, *ends, f"--set=training.warmup={3 / steps}")
    assert whole.returncode == 0, whole.stderr
    assert_same_results(tmp_path / "branch", tmp_path / "whole", steps)
    record = json.loads((tmp_path / "branch" / "run.json").read_text())
    assert record["steps"] == {"sparse": steps, "dense": steps}
    assert f"--resume={plateau}" in record["command"]


def test_what_has_no_level_end_is_refused(job, refused, undisturbed, plateau, tmp_path):
    out = f"--out={tmp_path / 'new' / 'deep'}"
    assert "training.schedule=cosine" in refused(f"--resume={undisturbed}", out, "--steps=20")
    assert "within the warm-up" in refused(f"--resume={plateau}", out, "--steps=3")
    assert "exists already" in refused(f"--resume={plateau}", f"--out={tmp_path}", "--steps=20")
    error = refused(f"--resume={plateau}", out, "--steps=6", "--set=training.decay=0.5")
    assert "no checkpoint of sparse until step 3" in error
    assert "--learning_rate" in refused(f"--resume={plateau}", out, "--learning_rate=1")
    assert not (tmp_path / "new").exists()
