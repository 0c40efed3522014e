"""Trackers get rows and alerts; a tracker that fails or is missing ends no training."""

import importlib.util
import json
import sys
import threading
import types
from typing import ClassVar

import pytest
from metric_rows import eval_row, train_row

from sparse_dataflow.core.training.clock import Clock
from sparse_dataflow.files.errors import UserError
from sparse_dataflow.monitoring import metrics as metrics_module
from sparse_dataflow.monitoring import trackers
from sparse_dataflow.monitoring.goodput import stall_alerts
from sparse_dataflow.monitoring.metrics import MetricsWriter


class Recorder:
    """A tracker of a user."""

    runs: ClassVar[list] = []

    def __init__(self, run):
        self.run, self.calls = run, []
        Recorder.runs.append(self)

    def write(self, row):
        self.calls.append(("write", row["step"]))
        if row["step"] == 13:
            raise OSError("no route to host")

    def alert(self, kind, text, step):
        self.calls.append((kind, text, step))

    def close(self):
        self.calls.append("close")


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setitem(sys.modules, "my_trackers", types.ModuleType("my_trackers"))
    monkeypatch.setattr(sys.modules["my_trackers"], "Recorder", Recorder, raising=False)
    Recorder.runs.clear()
    return Recorder


def folder_of(tmp_path):
    (tmp_path / "my_run" / "sparse").mkdir(parents=True)
    return tmp_path / "my_run" / "sparse"


def test_names_are_checked_and_nothing_is_imported():
    names = trackers.tracker_names("tensorboard, not_installed.module:Tracker")
    assert names == ("tensorboard", "not_installed.module:Tracker")
    assert trackers.tracker_names("none") == trackers.tracker_names("") == ()


@pytest.mark.parametrize("text", ["tensorbord", "a:b:c", "os.system", "wandb,wandb", ":x", "a/b:c"])
def test_illegal_names_are_refused(text, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    with pytest.raises(UserError, match="legal:"):
        trackers.tracker_names(text)


@pytest.mark.parametrize("name", trackers.PACKAGES)
def test_a_missing_package_is_named(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"pip install {name}"):
        trackers.tracker_names(name)


def test_a_tracker_of_the_user_gets_rows_and_alerts(tmp_path, recorder):
    folder = folder_of(tmp_path)
    writer = MetricsWriter(folder, 4, ["my_trackers:Recorder"], {"training": {"batch": 8}})
    writer.write(train_row(5))
    writer.alert("spike", "loss 99", 5)
    writer.write(eval_row(6))
    writer.close()
    (tracker,) = recorder.runs
    assert tracker.calls == [("write", 5), ("spike", "loss 99", 5), ("write", 6), "close"]
    assert (tracker.run.name, tracker.run.step) == ("my_run/sparse", 4)
    assert tracker.run.config == {"training": {"batch": 8}}
    assert not (folder / "tensorboard").exists()
    (line,) = (folder / "alerts.jsonl").read_text().splitlines()
    alert = json.loads(line)
    assert (alert["kind"], alert["step"], alert["text"]) == ("spike", 5, "loss 99")


def test_a_tracker_gets_no_secrets(tmp_path, recorder, monkeypatch):
    monkeypatch.setenv("MY_PAT", "a-made-up-secret")
    config = {
        "run": {"out": "/x/a-made-up-secret", "scale": "pico"},
        "data": {"corpus": ["https://u:p@ss@h/x", {"a": "https://h/?token=abc"}], "seed": 1},
    }
    MetricsWriter(folder_of(tmp_path), 0, ["my_trackers:Recorder"], config).close()
    (tracker,) = recorder.runs
    assert tracker.run.config == {
        "run": {"out": "/x/***", "scale": "pico"},
        "data": {"corpus": ["https://***@h/x", {"a": "https://h/?token=***"}], "seed": 1},
    }


def test_a_tracker_that_fails_gets_no_more_rows_and_ends_no_training(tmp_path, recorder, capsys):
    writer = MetricsWriter(folder_of(tmp_path), 0, ["my_trackers:Recorder"])
    for step in (12, 13, 14):
        writer.write(train_row(step))
    writer.close()
    assert recorder.runs[0].calls == [("write", 12), ("write", 13)]
    assert "my_trackers:Recorder failed (no route to host)" in capsys.readouterr().err
    rows = (tmp_path / "my_run" / "sparse" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 3


@pytest.mark.parametrize("error", [OSError("no route"), SystemExit("no route"), RecursionError()])
@pytest.mark.parametrize("method", ["write", "alert", "close"])
def test_whatever_a_tracker_raises_in_the_middle_ends_it_alone(
    tmp_path, recorder, monkeypatch, capsys, method, error
):
    def fails(*_):
        raise error

    monkeypatch.setattr(recorder, method, fails)
    writer = MetricsWriter(folder_of(tmp_path), 0, ["my_trackers:Recorder"])
    for step in (1, 2):
        writer.write(train_row(step))
        writer.alert("spike", "loss 99", step)
    writer.close()
    assert capsys.readouterr().err.count("my_trackers:Recorder failed") == 1
    rows = (tmp_path / "my_run" / "sparse" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 2


@pytest.mark.parametrize("name", ["my_trackers:Nothing", "sys:exit", "no_such_module_here:Tracker"])
def test_a_tracker_that_cannot_start_is_refused(tmp_path, recorder, name):
    with pytest.raises(UserError, match=f"tracker {name} cannot start"):
        MetricsWriter(folder_of(tmp_path), 0, [name])


class Calls:
    """Stands in for a module or an object: records calls by their dotted name."""

    def __init__(self, record, results, path=""):
        self._record, self._results, self._path = record, results, path

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Calls(self._record, self._results, f"{self._path}.{name}".strip("."))

    def __call__(self, *arguments, **keywords):
        self._record.append((self._path, arguments, keywords))
        return self._results.get(self._path, Calls(self._record, self._results, self._path))


def test_a_tracked_run_is_named_by_the_run_and_not_by_its_place(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(metrics_module, "opened", lambda name, run: opened.append(run.id))
    for folder in (tmp_path / "run" / "sparse", tmp_path / "moved" / "sparse"):
        folder.mkdir(parents=True)
        MetricsWriter(folder, 0, ["wandb"], run_id="77").close()
    assert opened == ["77-sparse"] * 2


def test_weights_and_biases_gets_scalars_over_the_step(tmp_path, monkeypatch):
    record: list = []
    monkeypatch.setitem(sys.modules, "wandb", Calls(record, {}))
    folder = folder_of(tmp_path)
    tracker = trackers.opened("wandb", trackers.TrackedRun(folder, "my_run/sparse", 0, {"a": {}}))
    tracker.write(train_row(2))
    tracker.alert("nan", "step 2 is not finite", 2)
    tracker.close()
    start, axis, log, alert, finish = record
    assert start[0] == "init" and start[2]["dir"] == str(folder) and start[2]["config"] == {"a": {}}
    assert axis[1:] == (("*",), {"step_metric": "step"})
    assert log[1][0]["train/loss"] == 3.0 and log[1][0]["step"] == 2
    assert "train/mfu" not in log[1][0]
    assert alert[2] == {"title": "nan at step 2", "text": "step 2 is not finite"}
    assert finish[0].endswith("finish")


@pytest.mark.parametrize("resumed", [False, True])
def test_mlflow_gets_scalars_and_a_resumed_run_continues(tmp_path, monkeypatch, resumed):
    record: list = []
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    results = {
        "MlflowClient.get_experiment_by_name": types.SimpleNamespace(experiment_id="7"),
        "MlflowClient.search_runs": [run] if resumed else [],
        "MlflowClient.create_run": run,
    }
    monkeypatch.setitem(sys.modules, "mlflow", Calls(record, results))
    tracked = trackers.TrackedRun(folder_of(tmp_path), "name", 0, {"training": {"batch": 8}})
    tracker = trackers.opened("mlflow", tracked)
    tracker.write({**eval_row(3), "bits_per_byte/my corpus#1": 1.0})
    tracker.alert("stall", "no progress", 3)
    tracker.close()
    names = [path.removeprefix("MlflowClient.") for path, *_ in record]
    assert ("create_run" in names) != resumed
    params = [arguments for path, arguments, _ in record if path.endswith("log_param")]
    assert params == ([] if resumed else [("r1", "training.batch", 8)])
    metrics = [arguments for path, arguments, _ in record if path == "entities.Metric"]
    assert "eval/bits_per_byte/my corpus_1" in [name for name, *_ in metrics]
    assert all(step == 3 for *_, step in metrics)
    assert record[-2][1] == ("r1", "alert.stall", "step 3: no progress")
    assert names[-1] == "set_terminated"


def test_a_stall_is_alerted_once_until_there_is_progress():
    clock, alerts, changed = Clock(), [], threading.Event()

    def alert(text):
        alerts.append(text)
        changed.set()

    clock.step = "step 3 of sparse"
    with clock.during("step"), stall_alerts(clock, alert, 0.02):
        assert changed.wait(60)
        changed.clear()
        assert not changed.wait(0.3)
        clock.progress += 1
        assert changed.wait(60)
    assert alerts == ["no progress for 0.02 seconds in step 3 of sparse"] * 2


@pytest.mark.parametrize(("activity", "seconds"), [("compile", 0.01), ("step", 0)])
def test_untimed_activities_and_zero_seconds_have_no_alerts(activity, seconds):
    clock, alerts = Clock(), []
    with clock.during(activity), stall_alerts(clock, alerts.append, seconds):
        threading.Event().wait(0.2)
    assert not alerts
