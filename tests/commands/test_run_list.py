"""Runs that a user may mean are listed alike, newest first; --resume and --run alone take one."""

import os
import subprocess
import sys

import pytest

from sparse_dataflow.commands import command_line, peer_flags, request, run_list
from sparse_dataflow.files.errors import UserError


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("b-new", "a-old", "c-oldest")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        for file in ("config.json", "run.json"):
            (folder / file).write_text("{}")
            os.utime(folder / file, (1e9 - age, 1e9 - age))
    (tmp_path / "runs" / "no-run").mkdir()
    return tmp_path / "runs"


def test_the_newest_run_is_taken_and_the_others_are_listed(runs):
    assert run_list.newest("--run") == os.path.join("runs", "b-new")
    listed = "b-new, runs/a-old, runs/c-oldest"
    for place in ("", "runs", "runs/no-run", "runs/mistyped", "elsewhere"):
        assert listed in run_list.runs_in_words(place), place


def test_a_folder_of_runs_does_not_deny_its_content(runs):
    with pytest.raises(
        UserError, match=r"--resume=runs is not a run folder; runs in runs, .*b-new"
    ):
        request.saved_config("runs")


@pytest.mark.parametrize("words", [["--resume"], ["--resume", "--seed=1"], ["--resume=newest"]])
def test_a_flag_alone_takes_the_newest(runs, words):
    with pytest.raises(UserError, match="b-new"):  # Its config.json is damaged.
        command_line.arguments(["x", *words], ["seed", "resume"], None)


def test_without_runs_the_flag_needs_a_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="which has none; write --resume=FOLDER"):
        command_line.arguments(["x", "--resume"], ["resume"], None)


def test_a_run_without_a_checkpoint_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "young").mkdir(parents=True)
    (tmp_path / "runs" / "young" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="none but young, which has no checkpoint yet"):
        run_list.newest("--run")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "evaluate", "watch"])
def test_commands_list_the_runs(runs, command):
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    for words in ([], ["--run=runs"]):
        done = subprocess.run(
            [sys.executable, "-m", f"experiments.{command}", *words], cwd=runs.parent,
            env=os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"}, capture_output=True,
            text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 2
        assert "runs/b-new, runs/a-old, runs/c-oldest" in done.stderr


@pytest.mark.parametrize(
    "name, hint",
    [("lr", "--learning_rate"), ("epochs", "--steps or --minutes"), ("config", "--flagfile"),
     ("device", "JAX_PLATFORMS"), ("learning-rate", "--learning_rate"), ("batch-size", "--batch"),
     ("output_dir", "--out"), ("seq_len", "training.sequence"), ("sparsity", "--density"),
     ("gpus", "--mesh"), ("model", "--init_from"), ("wandb", "run.trackers")],
)  # fmt: skip
def test_names_of_other_trainers_have_a_hint(name, hint):
    with pytest.raises(UserError) as error:
        command_line.arguments(["x", f"--{name}=3"], list(request.NAMED), None)
    assert hint in str(error.value)


def test_hints_name_what_is_legal():
    paths = {f"--set {path}" for path in request.settings.by_path(request.RunConfig)}
    flags = {f"--{name}" for name in request.NAMED}
    others = {"--run", "--max_new_tokens", "--samples", "--num_fewshot", "--to"}
    for here in peer_flags.HERE:
        name = here.partition("=")[0].split(" or ")[0]
        assert name in paths | flags | others, here


def test_a_reader_that_leaves_is_no_error():
    code = "import sys;[print('x' * 100) for _ in range(20000)]"
    quoted = code.replace("'", "\\'")
    command = (
        f'{sys.executable} -c "from sparse_dataflow.commands import command_line;'
        f"command_line.run_main(lambda *_: exec('{quoted}'), 'doc')\""
        " | head -1; exit ${PIPESTATUS[0]}"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "x" * 100 + "\n"
