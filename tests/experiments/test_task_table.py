"""One command puts trained models into a table of tasks, and goes on where it was stopped."""

import importlib.util
import json

import pytest
from exit_status import exit_status

from experiments import task_table
from sparse_dataflow.data import cache

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="the extra eval is not installed"
)


def test_models_of_a_run_in_one_table(job, copy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cache, "FOLDER", job.cache / "sparse_dataflow")
    monkeypatch.chdir(tmp_path)
    flags = (
        f"--models=dense={copy}:dense,sparse={copy}",
        *("--tasks=brackets,cloze", "--items=6", "--num_fewshot=0", "--out=table"),
    )
    assert exit_status(task_table, *flags) == 0
    table = json.loads((tmp_path / "table" / "task_table.json").read_text())
    assert table["names"] == ["dense", "sparse"] and table["seeds"] == 1
    assert [row["task"] for row in table["rows"]] == ["brackets", "cloze"]
    (scores,) = (tmp_path / "table").glob("evaluation_0-*.record")
    evaluation = json.loads(scores.read_text())["facts"]["facts"]
    for row, line in zip(evaluation["rows"][1:], table["rows"]):
        for name, score in line["scores"].items():
            assert score == pytest.approx(row["models"][name]["value"])
    # The report of the run has the scores with their paired differences.
    in_run = json.loads((copy / "evaluation.json").read_text())
    assert list(in_run["models"]) == ["dense", "sparse"]
    for row, again in zip(evaluation["rows"], in_run["rows"], strict=True):
        assert again["models"] == row["models"] and "difference" in again["paired"]["sparse"]
    assert 'id="evaluation"' in (copy / "report.html").read_text()
    assert "| brackets | 0 | 33% |" in (tmp_path / "table" / "task_table.md").read_text()
    assert exit_status(task_table, f"--models=dense={copy},mine={copy}", "--out=two") == 2
    assert f"legal: mine={copy}:sparse, mine={copy}:dense" in capsys.readouterr().err
    # The same command scores nothing again; a file of someone else stays.
    before = scores.stat().st_mtime_ns
    capsys.readouterr()
    assert exit_status(task_table, *flags) == 0
    assert scores.stat().st_mtime_ns == before
    assert exit_status(task_table, *flags, "--steps=9", "--density=0.5") == 2
    assert "so it reads no sparsity.density, steps" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    assert exit_status(task_table, *flags[:-1], "--out=other") == 2
    assert "mine.txt" in capsys.readouterr().err


def test_what_cannot_be_compared_is_refused_before_a_folder_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for flags, words in (
        (("--models=dense=gone:dense,sparse=gone",), "--models=gone does not exist"),
        (("--set", "run.out=x"), "this study sets run.out itself"),
        (("--set", "evolution.method=rigl"), "this study sets evolution.method itself"),
        (("--set", "model.experts=4"), "this study sets model.experts itself"),
    ):
        assert exit_status(task_table, *flags, "--out=table") == 2
        assert words in capsys.readouterr().err and not (tmp_path / "table").exists()
