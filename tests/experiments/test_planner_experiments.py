"""The planner's experiments from end to end, in this process: what they print, keep and refuse."""

import csv

import pytest
from absl import flags as absl_flags

from experiments import flags, layout_search, planner_truth, scaling_study


def run(experiment, *arguments):
    """(exit status) of an experiment's main, as its command would leave."""
    values = absl_flags.FlagValues()
    argv = ["program", *arguments]
    with pytest.raises(SystemExit) as left:
        flags.run(experiment.main, experiment.__doc__, experiment.GROUPS, argv, values)
    return left.value.code


def test_layout_search_prints_the_best_and_the_command(tmp_path, capsys):
    asked = ("--scale=1.3b", "--hardware=a100-80gb", "--chips=16", "--batch=512", "--explain=3")
    assert run(layout_search, *asked, f"--out={tmp_path}") == 0
    said = capsys.readouterr().out
    assert "all priced" in said and "what decides: Shapley effects" in said
    assert said.count("memory of the fullest chip") == said.count("term of a step") == 3
    command = said.strip().splitlines()[-1].strip()
    words = dict(w[2:].split("=") for w in command.split() if w.startswith("--"))
    known = {flag.name for group in flags.GROUPS for flag in group.flags}
    assert set(words) <= known
    mesh = dict(axis.split(":") for axis in words["mesh"].split(","))
    assert set(mesh) == {"data", "stage", "fsdp", "tensor"}
    chips = 1
    for size in mesh.values():
        chips *= int(size)
    assert chips == 16 and words["batch"] == "512" and words["scale"] == "1.3b"
    assert command.startswith("python -m experiments.gpt13b_dense ")
    with (tmp_path / "trials.csv").open() as file:
        trials = list(csv.DictReader(file))
    speeds = [float(row["tokens_per_second_per_chip"]) for row in trials]
    assert len(trials) > 10 and speeds == sorted(speeds, reverse=True)
    for name in ("sensitivity.png", "roofline.png"):
        assert (tmp_path / name).stat().st_size > 10_000


def test_a_sparse_search_prints_the_sparse_command(tmp_path, capsys):
    asked = ("--scale=1.3b", "--chips=8", "--batch=256", "--density=0.125")
    assert run(layout_search, *asked, f"--out={tmp_path}") == 0
    said = capsys.readouterr().out
    assert "experiments.gpt13b_sparse --scale=1.3b" in said and "--density=0.125" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hardware=gtx1080",), "matches no chip; legal: a100-40gb"),
        (("--scale=175b", "--chips=8"), "closest legal request is --chips="),
        (("--scale=1.3b", "--chips=40", "--batch=7"), "closest legal batch is --batch=5"),
        (("--density=0.5", "--block=100"), "--block=100 does not divide"),
        (("--chips=0",), "--chips=0 is not legal"),
    ],
)
def test_what_cannot_be_is_refused_in_words(tmp_path, capsys, arguments, words):
    assert run(layout_search, *arguments, f"--out={tmp_path}") == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said


def test_truth_is_told_row_by_row(tmp_path, capsys):
    assert run(planner_truth, f"--out={tmp_path}") == 0
    said = capsys.readouterr().out
    assert "held out " in said and "175B strong" in said and "4.5x" in said
    with (tmp_path / "truth.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 92 and {row["split"] for row in rows} == {"fit", "test"}
    assert (tmp_path / "truth.png").stat().st_size > 10_000


def test_scaling_names_what_limits_each_point(tmp_path, capsys):
    asked = ("--hardware=h100", "--kinds=strong", "--most=128", f"--out={tmp_path}")
    assert run(scaling_study, *asked) == 0
    with (tmp_path / "scaling.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["chips"] for row in rows} == {"64", "128"} and all(row["limit"] for row in rows)
    assert {row["model"] for row in rows} <= set(scaling_study.MODELS)
    assert "| strong | 22b | h100 | 64 |" in (tmp_path / "scaling.md").read_text()
    assert (tmp_path / "strong.png").stat().st_size > 10_000
    assert run(scaling_study, "--most=32", f"--out={tmp_path}") == 2
