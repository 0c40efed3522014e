"""Files that this project did not write stay as they are, whatever an experiment is asked to do."""

import importlib
import json
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from main_job import PICO

from experiments.benchmarks import pipeline_bubble
from experiments.studies import study
from sparse_dataflow.commands import measurement, run_folder
from sparse_dataflow.evaluation.run_files import RunRecord
from sparse_dataflow.files import folders
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.runs.run_config import preset

RECORD = RunRecord(
    "gpt13b_sparse", ("python",), "today", {}, "a chip", "texts", "0", "0", 512,
    {"sparse": 1, "dense": 1},
)  # fmt: skip

NAMES = (
    "tokenizer.json", "report.html", "report.json", "goodput.jsonl", "notes.txt", "config.json",
    "config.json.0a1b2c3d.new", "tokenizer.json.0a1b2c3d.new", ".writable", "settings.json",
    "law.json", "law.md", "runs.csv", "quality.md", "quality.json", "truth.csv", "scaling.csv",
    "scaling.md",
    "interplay.md", "interplay.csv", "trials.csv", "trials.journal", "coordinate_check.json",
    "evaluation.json", folders.MARK,
)  # fmt: skip
"""Names that the experiments write, and one of the user's."""

WRITERS = {
    "gpt13b_sparse": (*PICO, "--steps=2"),
    "gpt13b_dense": ("--scale=pico", "--steps=2"),
    "sparse_quality": ("--scale=pico", "--steps=2", "--block=16"),
    "sparse_scaling_law": ("--widths=32", "--lengths=2"),
    "coordinate_check": ("--widths=32,64", "--steps=1"),
    "planner_truth": (),
    "scaling_study": ("--most=64",),
    "layout_search": ("--scale=1.3b", "--chips=h100:16", "--batch=512"),
    "interplay": ("--hardware=h100", "--measure=no"),
    "shape_search": ("--served_flops=32640", "--tokens=2e6", "--train=1"),
    "chip_report": (),
}
"""Experiment with --out -> flags with which it would run."""


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def filled(folder, names):
    folder.mkdir()
    for name in names:
        (folder / name).write_text(f"mine: {name}")
    return folder


@pytest.mark.parametrize("experiment", WRITERS)
@pytest.mark.parametrize("names", [NAMES, ("notes.txt",), ("tokenizer.json",), (folders.MARK,)])
def test_every_experiment_refuses_a_folder_of_others(refused, job, tmp_path, experiment, names):
    mine = filled(tmp_path / "mine", names)
    before, corpus = contents(tmp_path), (f"--corpus={job.corpus}",)
    module = importlib.import_module(f"experiments.{experiment}")
    takes_corpus = "corpus" in getattr(module, "SHARED", ())
    error = refused(
        *WRITERS[experiment],
        *(corpus if takes_corpus else ()),
        f"--out={mine}",
        experiment=experiment,
    )
    assert str(mine) in error and any(name in error for name in names), error
    assert "missing or empty" in error
    assert contents(tmp_path) == before


def test_a_refused_run_removes_nothing_of_others(refused, job, tmp_path):
    """The folder's refusal comes first, so that no other one meets its files."""
    mine = filled(tmp_path / "mine", ("tokenizer.json", "report.html", "goodput.jsonl"))
    before = contents(mine)
    refused("--scale=pico", "--density=0.3", f"--corpus={job.corpus}", f"--out={mine}")
    assert contents(mine) == before


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(
    files=st.dictionaries(st.sampled_from(NAMES), st.binary(max_size=20), min_size=1),
    owner=st.sampled_from(sorted(WRITERS)),
)
def test_any_files_are_refused_and_stay(tmp_path_factory, files, owner):
    folder = tmp_path_factory.mktemp("any")
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for attempt in (
        lambda: folders.claim(folder, owner),
        lambda: study.keep_settings(folder, preset("pico"), owner),
        lambda: run_folder.opened(owner, str(folder), False).__enter__(),
    ):
        with pytest.raises(UserError, match="missing or empty"):
            attempt()
    assert contents(folder) == files


def test_an_empty_folder_is_taken_and_left_empty_by_a_refusal(refused, job, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(*PICO, "--block=48", f"--corpus={job.corpus}", f"--out={tmp_path / 'empty'}")
    assert not list((tmp_path / "empty").iterdir())


class Tokens:
    content = "{}"

    def save(self, path):
        path.write_text(self.content)


def test_files_that_came_while_a_run_compiled_stay(tmp_path):
    with pytest.raises(UserError, match=r"notes\.txt"):
        with run_folder.opened("gpt13b_sparse", str(tmp_path / "run"), resume=False) as (folder, _):
            (folder / "notes.txt").write_text("mine")
            (folder / "tokenizer.json").write_text("mine")
            run_folder.start(folder, preset("pico"), RECORD, Tokens())
    mine = {"notes.txt": b"mine", "tokenizer.json": b"mine"}
    assert mine.items() <= contents(tmp_path / "run").items()


def test_a_run_killed_before_its_config_begins_anew(tmp_path):
    """As kill -9 leaves it between the two files."""
    folders.claim(tmp_path / "run", "gpt13b_sparse")
    (tmp_path / "run" / "tokenizer.json").write_text("{}")
    with run_folder.opened("gpt13b_sparse", str(tmp_path / "run"), resume=False) as (folder, _):
        run_folder.start(folder, preset("pico"), RECORD, Tokens())
    assert (folder / "config.json").exists()
    with pytest.raises(UserError, match="holds a run already"):
        with run_folder.opened("gpt13b_dense", str(folder), resume=False):
            pass


def test_a_claimed_folder_is_taken_again_by_its_owner_alone(tmp_path):
    folder = tmp_path / "deep" / "out"
    folders.claim(folder, "planner_truth")
    (folder / "truth.csv").write_text("ours")
    folders.claim(folder, "planner_truth")
    with pytest.raises(UserError, match=r"scaling_study may not replace \(truth\.csv\)"):
        folders.claim(folder, "scaling_study")


def test_what_a_claim_made_is_removed_and_nothing_else(tmp_path):
    folder = tmp_path / "deep" / "out"
    folders.claim(folder, "planner_truth")()
    assert not list(tmp_path.iterdir())
    undo = folders.claim(folder, "planner_truth")
    (folder / "truth.csv").write_text("ours")
    undo()
    assert sorted(contents(folder)) == [folders.MARK, "truth.csv"]
    folders.claim(folder, "planner_truth")()
    assert sorted(contents(folder)) == [folders.MARK, "truth.csv"]


def test_a_link_is_no_mark(tmp_path):
    folders.claim(tmp_path / "one", "planner_truth")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / folders.MARK).symlink_to(tmp_path / "one" / folders.MARK)
    with pytest.raises(UserError, match="may not replace"):
        folders.claim(tmp_path / "two", "planner_truth")


@pytest.mark.parametrize("content", ["mine", "{}", "[]", '{"command": "python -m experiments.x"}'])
def test_a_result_stands_beside_a_file_of_its_name(tmp_path, content):
    (tmp_path / "step.json").write_text(content)
    path = measurement.keep(str(tmp_path), "step", "abacus", [{"a": 1}])
    assert path == tmp_path / "step_2.json"
    assert measurement.keep(str(tmp_path), "step", "abacus", [{"a": 2}]) == path
    assert json.loads(path.read_text())["a"] == 2
    assert (tmp_path / "step.json").read_text() == content


def test_a_result_of_another_experiment_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["step_bench.py", "--keep=here"])
    first = measurement.keep(str(tmp_path), "step", "abacus", [{}])
    monkeypatch.setattr(sys, "argv", ["step_bench.py", "--rounds=2"])
    assert measurement.keep(str(tmp_path), "step", "abacus", [{}]) == first
    monkeypatch.setattr(sys, "argv", ["block_bench.py"])
    assert measurement.keep(str(tmp_path), "step", "abacus", [{}]) != first


def test_a_page_of_schedules_replaces_its_like_alone(tmp_path):
    page, path = "<html><title>Schedules</title>", tmp_path / "page.html"
    for text in (page + "1", page + "2"):
        pipeline_bubble._write_page(path, text)
        assert path.read_text() == text
    path.write_text("<html><title>Mine</title>")
    with pytest.raises(UserError, match="did not write"):
        pipeline_bubble._write_page(path, page)
    assert "Mine" in path.read_text()


def test_an_evaluation_needs_a_run(refused, tmp_path):
    pytest.importorskip("lm_eval")
    mine = filled(tmp_path / "mine", ("evaluation.json", "report.json", "report.html"))
    before = contents(mine)
    assert str(mine) in refused(f"--run={mine}", experiment="evaluate")
    assert contents(mine) == before
