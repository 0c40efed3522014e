"""The recorded command of a run exists and trains the same again."""

import json
import os
import shlex
import subprocess
import sys

import pytest
from places import ROOT

import sparse_dataflow as sd
from sparse_dataflow.commands import experiment_modules, run_folder
from sparse_dataflow.monitoring.metrics import read_metrics

TEXTS = [f"Document {number} has a few words of its own, number {number}. " * 40
         for number in range(40)]  # fmt: skip


def losses(folder, variant="sparse"):
    return [row["loss"] for row in read_metrics(folder / variant / "metrics.jsonl")
            if row["kind"] in ("train", "eval", "final")]  # fmt: skip


def record(folder):
    return json.loads((folder / "run.json").read_text())


@pytest.mark.slow
def test_the_recorded_command_trains_the_same_again(tmp_path):
    (tmp_path / "my texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "my texts" / f"{number}.txt").write_text(text)
    command = (
        "python -m experiments.gpt13b_sparse --scale=pico --block=16 --notwin --steps=2 "
        f"--corpus='{tmp_path}/my texts' --out=run --set training.warmup=0.5"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    records = []
    for name in ("first", "again"):
        where = tmp_path / name
        where.mkdir()
        words = shlex.split(command)
        assert words[0] == "python"
        done = subprocess.run(
            [sys.executable, *words[1:]], cwd=where, env=environment, capture_output=True,
            text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        report = json.loads((where / "run" / "report.json").read_text())
        command = report["command"]
        records.append((record(where / "run")["command"], losses(where / "run")))
    assert records[0] == records[1] and records[0][1]


@pytest.mark.slow
def test_the_recorded_call_trains_the_same_again(
    tmp_path, monkeypatch, reports_without_continuations
):
    config = sd.preset("pico").change(
        sparsity__block=16, run__twin=False, training__steps=2, training__warmup=0.5
    )
    run = sd.train(config.change(run__out=str(tmp_path / "a")), texts=TEXTS)
    (call,) = record(run.folder)["command"]
    assert call.startswith("sd.train(") and "run__out" not in call
    monkeypatch.chdir(tmp_path)
    again = eval(call, {"sd": sd, "texts": TEXTS})
    assert losses(again.folder) == losses(run.folder)
    assert json.loads((run.folder / "report.json").read_text())["command"] == call


def test_a_call_makes_the_config_that_it_was_made_from():
    for config in (
        sd.preset("13b", compute_dtype="bfloat16"),
        sd.preset("pico").change(sparsity__projections=("mlp_in",), evolution__method="rigl"),
        sd.preset("nano").dense(),
    ):
        call = run_folder.python_call(config)
        evaluated = eval(call, {"sd": _Recorder()})
        assert evaluated == config


class _Recorder:
    preset = staticmethod(sd.preset)
    train = staticmethod(lambda config: config)


def test_a_record_names_code_host_and_seed(tmp_path, reports_without_continuations):
    config = sd.preset("pico").change(
        sparsity__block=16, run__twin=False, training__steps=1, training__seed=7,
        run__out=str(tmp_path / "run"),
    )  # fmt: skip
    saved = record(sd.train(config, texts=TEXTS).folder)
    assert saved["seed"] == 7 and saved["host"]
    if (ROOT / ".git").exists():
        assert len(saved["code"]["commit"]) == 40 and type(saved["code"]["dirty"]) is bool


def test_an_installed_wheel_names_the_console_script(monkeypatch):
    monkeypatch.setattr(experiment_modules, "_in_wheel", lambda: True)
    assert experiment_modules.command_of("evaluate") == "sparse-dataflow evaluate"
    monkeypatch.setattr(experiment_modules, "_in_wheel", lambda: False)
    assert experiment_modules.command_of("evaluate") == "python -m experiments.evaluate"
