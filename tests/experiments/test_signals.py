"""SIGINT and SIGTERM: a run saves, says how to go on, and loses nothing."""

import re
import shlex

import pytest
from main_job import assert_same_results, checkpoint_steps, rows

from sparse_dataflow.files import manifest

FIRST_SAVE = r"sparse/checkpoints/3\.saving"


def assert_quiet(done, status):
    assert done.returncode == status, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr


@pytest.mark.slow
def test_a_stopped_run_says_how_to_go_on_and_ends_at_the_same_bits(job, undisturbed, tmp_path):
    folder = tmp_path / "my run"
    stopped = job.new(folder, events=[(FIRST_SAVE, 1, "SIGTERM")])
    # A machine that is taken away asks to be started again; one who pressed Ctrl-C does it himself.
    for status, name in ((75, "SIGINT"), (0, None)):
        assert_quiet(stopped, status)
        assert "saved at step" in stopped.stderr
        done = len([row for row in rows(folder, "dense") if row["kind"] == "train"])
        assert done == max(checkpoint_steps(folder, "dense")) < 12
        assert not (folder / "report.html").exists()
        command = re.search("resume with: (.*)", stopped.stderr)[1]
        words = shlex.split(command)
        assert words[:3] == ["python", "-m", "experiments.gpt13b_sparse"]
        assert words[3:] == [f"--resume={folder}"]
        events = [(r"dense/checkpoints/9\.saving", 1, name)] if name else ()
        stopped = job.run(*words[3:], events=events)
    assert_quiet(stopped, 0)
    assert_same_results(folder, undisturbed)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_and_loses_no_checkpoint(job, tmp_path):
    second = (r"dense/checkpoints/\d+\.saving", 1, "SIGINT again")
    done = job.new(tmp_path / "run", events=[(FIRST_SAVE, 1, "SIGINT"), second])
    assert_quiet(done, 130)
    assert "Ctrl-C again to stop at once" in done.stderr
    assert "dense saved at step" not in done.stderr
    assert checkpoint_steps(tmp_path / "run", "sparse")[0] == 3
    for variant in ("sparse", "dense"):
        for step in checkpoint_steps(tmp_path / "run", variant):
            manifest.verify(tmp_path / "run" / variant / "checkpoints" / str(step))


@pytest.mark.slow
@pytest.mark.parametrize("moment", [r"/tokens/", r"jit_train_step"])
def test_ctrl_c_before_training_leaves_nothing(job, undisturbed, tmp_path, moment):
    cache = tmp_path / "cache" if "tokens" in moment else None
    done = job.new(tmp_path / "run", events=[(moment, 1, "SIGINT")], cache=cache)
    assert_quiet(done, 130)
    assert not (tmp_path / "run").exists()
