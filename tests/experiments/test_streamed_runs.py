"""Runs through a dataset of a hub, served here: killed and gone on with, on other processes."""

import gzip
import json
import random
import signal

import numpy as np
import pytest
from fake_hub import FakeHub
from main_job import PICO, arrays, assert_same_results, complaint, rows
from test_processes import ended, numbers_of, start

STEPS = 40
PLAN = (
    *PICO, f"--steps={STEPS}", "--set=run.checkpoint_every=20", "--set=run.eval_every=20",
    "--notwin", "--corpus=hf:owner/name",
)  # fmt: skip
"""More steps than the batches of a shuffled block, so that a resumed run begins in a later one."""


@pytest.fixture
def hub(tmp_path):
    server = FakeHub(tmp_path / "hub")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 7))) for _ in range(200)]
    for n in range(4):
        path = server.folder / "owner" / "name" / f"train-{n}.jsonl.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = (" ".join(draw.choices(words, k=draw.randint(5, 200))) for _ in range(200))
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        path.write_bytes(gzip.compress(lines.encode()))
    yield server
    server.close()


@pytest.fixture
def served(job, hub, tmp_path):
    """Options of `job.run` that make its libraries use the hub."""
    home = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
    return {"environment": home | {"XDG_CACHE_HOME": str(tmp_path / "cache")}}


def run(job, served, *arguments, **options):
    fork = job.start(*arguments, **served, **options)
    fork.wait()
    return fork


def left_alone_and_killed(job, served, plan, tmp_path, at):
    """Returns the folders of a run and of the same one, killed while it saved a step."""
    whole, folder = tmp_path / "whole", tmp_path / "run"
    done = run(job, served, *plan, f"--out={whole}")
    assert done.returncode == 0, done.stderr
    saving = rf"checkpoints/{at}\.saving"
    killed = run(job, served, *plan, f"--out={folder}", events=[(saving, 1, "SIGKILL")])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    return whole, folder


@pytest.mark.slow
def test_a_streamed_run_that_is_killed_ends_at_the_bits_of_one_left_alone(
    job, served, hub, tmp_path
):
    whole, folder = left_alone_and_killed(job, served, PLAN, tmp_path, at=40)
    # The dataset grows meanwhile: a run keeps the revision that it began with.
    before = hub.revision("owner/name")
    assert json.loads((folder / "run.json").read_text())["corpus"] == f"hf:owner/name@{before}"
    resumed = run(job, served, f"--resume={folder}")
    assert "resumes after step 20 of 40" in resumed.stderr
    assert resumed.returncode == 0, resumed.stderr
    assert_same_results(folder, whole, STEPS)
    extra = json.loads((folder / "sparse/checkpoints/40/extra.json").read_text())
    assert max(block for lane in extra["extra"]["data_positions"][0] for block in lane[:1]) >= 2


@pytest.mark.nightly
def test_a_streamed_run_of_the_125m_shape_that_is_killed_ends_at_the_same_bits(
    job, served, tmp_path
):
    plan = (
        "--scale=125m", "--batch=2", "--steps=4", "--notwin", "--corpus=hf:owner/name",
        "--set=training.sequence=64", "--set=run.checkpoint_every=2", "--set=run.eval_every=4",
        "--set=model.vocab_size=512",
    )  # fmt: skip
    whole, folder = left_alone_and_killed(job, served, plan, tmp_path, at=4)
    resumed = run(job, served, f"--resume={folder}")
    assert "resumes after step 2 of 4" in resumed.stderr and resumed.returncode == 0, resumed.stderr
    assert_same_results(folder, whole, 4)


@pytest.mark.slow
def test_two_processes_read_their_own_lanes_and_one_continues(job, served, tmp_path):
    one, folder = tmp_path / "one", tmp_path / "run"
    assert run(job, served, *PLAN, f"--out={one}").returncode == 0
    plan = (*PLAN, f"--out={folder}")
    happening = {
        n: served | {"events": [(r"checkpoints/40\.saving", 1, "SIGKILL")]} for n in (0, 1)
    }
    started = ended(start(job, 2, (0, 1), *plan, happening=happening))
    assert started[0].returncode == -signal.SIGKILL, started[0].stderr
    extra = json.loads((folder / "sparse/checkpoints/20/extra.json").read_text())
    assert all(block >= 0 for block, *_ in extra["extra"]["data_positions"][0])
    resumed = run(job, served, f"--resume={folder}", "--set=parallel.processes=1")
    assert resumed.returncode == 0, resumed.stderr
    mine, right = numbers_of(folder), numbers_of(one)
    assert mine.keys() == right.keys()
    np.testing.assert_allclose(list(mine.values()), list(right.values()), rtol=2e-4)
    assert len([row for row in rows(folder, "sparse") if row["kind"] == "train"]) == STEPS
    assert arrays(folder, "sparse", STEPS).keys() == arrays(one, "sparse", STEPS).keys()


def test_a_dataset_that_is_not_there_is_refused_before_anything_is_made(job, served, tmp_path):
    done = run(job, served, *PLAN, "--corpus=hf:owner/missing", f"--out={tmp_path / 'run'}")
    assert "owner/missing could not be listed" in complaint(done)
    assert not (tmp_path / "run").exists()
