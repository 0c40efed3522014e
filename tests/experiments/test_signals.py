"""SIGINT and SIGTERM: a run saves, says how to go on, and loses nothing."""

import itertools
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


@pytest.mark.parametrize("moment", [r"/tokens/", r"jit_train_step"])
def test_ctrl_c_before_training_leaves_nothing(job, undisturbed, tmp_path, moment):
    cache = tmp_path / "cache" if "tokens" in moment else None
    done = job.new(tmp_path / "run", events=[(moment, 1, "SIGINT")], cache=cache)
    assert_quiet(done, 130)
    assert not (tmp_path / "run").exists()


MOMENTS = {
    "reading the corpus": {"events": [(r"/tokens/", 1, "{}")]},
    "compiling": {"events": [(r"jit_train_step", 1, "{}")]},
    "the final evaluation": {"calls": [("sparse_dataflow.core.training.held_out.nats", 3, "{}")]},
    "the report": {"events": [(r"report\.json", 1, "{}")]},
}


DAILY = [
    ("reading the corpus", "SIGTERM"),
    ("compiling", "SIGHUP"),
    ("the final evaluation", "SIGTERM"),
    ("the report", "SIGHUP"),
]
"""Each moment and each signal; the other pairs are nightly."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "name"),
    [
        pytest.param(*pair, marks=() if pair in DAILY else pytest.mark.nightly)
        for pair in itertools.product(MOMENTS, ["SIGTERM", "SIGHUP"])
    ],
)
def test_a_signal_outside_training_ends_with_75(job, tmp_path, moment, name):
    """Nothing is lost, and the same command or --resume goes on."""
    happening = {
        kind: [(where, count, name) for where, count, _ in given]
        for kind, given in MOMENTS[moment].items()
    }
    cache = tmp_path / "cache" if "corpus" in moment else None
    folder = tmp_path / "run"
    done = job.new(folder, "--notwin", cache=cache, **happening)
    assert_quiet(done, 75)
    assert f"stopped: ended by {name}; start it again" in done.stderr
    before_training = moment in ("reading the corpus", "compiling")
    assert folder.exists() != before_training
    if not before_training:
        assert checkpoint_steps(folder, "sparse")[-1] == 12
        resumed = job.resume(folder)
        assert_quiet(resumed, 0)
        assert (folder / "report.html").exists()


def test_a_signal_ends_a_process_that_is_inside_a_long_call(job, undisturbed, tmp_path):
    """As a compiler is; Python does not run a handler before the call returns."""
    folder = tmp_path / "run"
    stuck = "sparse_dataflow.commands.job.build.compile_programs"
    done = job.new(folder, "--notwin", calls=[(stuck, 1, "SIGTERM in a long call")])
    assert_quiet(done, 75)
    assert "stopped: ended by SIGTERM" in done.stderr
    assert not folder.exists()


@pytest.mark.slow
def test_a_long_step_after_sigterm_ends_without_a_save_and_what_was_saved_stays(job, tmp_path):
    folder = tmp_path / "run"
    stuck = "sparse_dataflow.core.training.loop.run_step"
    happening = [(stuck, 6, "SIGTERM in a long call")]
    done = job.new(folder, "--notwin", "--grace=0.5", calls=happening)
    assert_quiet(done, 75)
    assert "no step ended within 0.5 seconds" in done.stderr
    assert checkpoint_steps(folder, "sparse") == [3]
    manifest.verify(folder / "sparse/checkpoints/3")
    resumed = job.resume(folder)
    assert_quiet(resumed, 0)
    assert checkpoint_steps(folder, "sparse")[-1] == 12


def test_a_hangup_saves(job, tmp_path):
    done = job.new(tmp_path / "run", "--notwin", events=[(FIRST_SAVE, 1, "SIGHUP")])
    assert_quiet(done, 75)
    assert "sparse saved at step" in done.stderr
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
def test_a_hangup_under_nohup_is_ignored(job, tmp_path):
    done = job.new(
        tmp_path / "run",
        "--notwin",
        ignored=["SIGHUP"],
        events=[(r"jit_train_step", 1, "SIGHUP"), (FIRST_SAVE, 1, "SIGHUP")],
    )
    assert_quiet(done, 0)
