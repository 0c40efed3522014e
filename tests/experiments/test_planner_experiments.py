"""The planner's experiments from end to end, in this process: what they print, keep and refuse."""

import csv
import sys
import types

import pytest
from absl import flags as absl_flags

from experiments import flags, layout_search, planner_truth, scaling_study
from experiments import interplay as interplay_study
from sparse_dataflow.files import folders


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


@pytest.mark.parametrize(
    ("engine", "journal"), [("optuna", "trials.journal"), ("deephyper", "trials.deephyper.jsonl")]
)
def test_a_sparse_sampled_search_goes_on(engine, journal, tmp_path, capsys):
    pytest.importorskip(engine)
    asked = ("--scale=1.3b", "--chips=8", "--batch=256", "--density=0.125", f"--engine={engine}")
    for trials in (25, 40):
        assert run(layout_search, *asked, f"--trials={trials}", f"--out={tmp_path}") == 0
        said = capsys.readouterr().out
        assert f"legal layouts of {trials} sampled" in said
        assert "experiments.gpt13b_sparse --scale=1.3b" in said and "--density=0.125" in said
    assert (tmp_path / journal).exists()
    assert run(layout_search, *asked, "--chips=4", f"--out={tmp_path}") == 2
    assert "another request" in capsys.readouterr().err


def test_a_journal_of_another_request_is_named_before_its_trials_are_read(
    tmp_path, monkeypatch, capsys
):
    """They lie outside of what is searched; DeepHyper itself need not be there."""
    hpo = types.SimpleNamespace(CBO=None, HpProblem=None)
    monkeypatch.setitem(sys.modules, "deephyper", types.SimpleNamespace(hpo=hpo))
    monkeypatch.setitem(sys.modules, "deephyper.hpo", hpo)
    folders.claim(tmp_path, "layout_search")
    journal = tmp_path / "trials.deephyper.jsonl"
    asked = ("--scale=1.3b", "--chips=8", "--batch=256", "--engine=deephyper", f"--out={tmp_path}")
    for begin, words in (('"other"', "holds trials of another request"), ("3", "is damaged")):
        journal.write_text(begin + '\n[{"tensor": 99}, 1.0, ""]\n')
        assert run(layout_search, *asked) == 2
        assert words in capsys.readouterr().err


def test_an_engine_that_is_not_installed_is_answered_with_those_that_are(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "deephyper.hpo", None)
    asked = ("--scale=1.3b", "--chips=8", "--batch=256", "--engine=deephyper")
    assert run(layout_search, *asked, f"--out={tmp_path}") == 2
    assert "legal without it: auto, exhaustive, optuna" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hardware=gtx1080",), "is an unknown chip; legal: a100-40gb"),
        (("--scale=175b", "--chips=8"), "closest that does is --chips="),
        (("--scale=1.3b", "--chips=40", "--batch=7"), "closest that one does is --batch=5"),
        (("--density=0.5", "--block=100"), "--block=100 does not divide"),
        (("--chips=0",), "--chips=0 is not legal"),
        (("--engine=magic",), "Legal: auto, exhaustive, optuna"),
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


def test_interplay_of_a_chip_that_is_not_here(tmp_path, capsys):
    asked = ("--hardware=a100-80gb", "--scale=13b", "--measure=no", "--tokens=16384", "--block=128")
    assert run(interplay_study, *asked, f"--out={tmp_path}") == 0
    assert "1/8 of the blocks gains" in capsys.readouterr().out
    with (tmp_path / "interplay.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 and all(not row["serial_measured_ms"] for row in rows)
    predicted = {(row["density"], row["fused"]): float(row["serial_predicted_ms"]) for row in rows}
    fused = predicted["1.0", "True"] / predicted["0.125", "True"]
    unfused = predicted["1.0", "False"] / predicted["0.125", "False"]
    assert fused > 1.5 * unfused
    assert run(interplay_study, "--measure=no", f"--out={tmp_path}") == 2
    assert "--hardware=this is known by measuring" in capsys.readouterr().err
    assert run(interplay_study, "--stages=3", f"--out={tmp_path}") == 2
    assert "legal: 1 to 2" in capsys.readouterr().err
