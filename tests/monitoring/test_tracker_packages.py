"""Weights & Biases and MLflow themselves, where they are installed: what they store, offline."""

import json

import pytest
from metric_rows import eval_row, train_row

from sparse_dataflow.files.folders import refuse_outside_links
from sparse_dataflow.monitoring import trackers
from sparse_dataflow.monitoring.metrics import MetricsWriter

CONFIG = {"training": {"batch": 8, "optimizer": "adamw"}, "run": {"trackers": "mlflow"}}
BLOCK = 2**15
"""Bytes of a block of a .wandb file, which is a LevelDB log with a head of 7 bytes."""


def track(folder, name, first, last, alert=None):
    """Trains from step `first` to `last` as far as a tracker can see."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = MetricsWriter(folder, first - 1, [name], CONFIG)
    for step in range(first, last + 1):
        writer.write(train_row(step))
    writer.write({**eval_row(last), "bits_per_byte/my corpus#1": 1.25})
    if alert:
        writer.alert(*alert, last)
    writer.close()


def wandb_records(folder, kind):
    """Returns the records of a kind in the one .wandb file below a folder."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # Its process may still be writing, as after the end of a training.
    (path,) = folder.rglob("*.wandb")
    data, position, piece, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:  # The rest of a block that has no room for a head.
            position += BLOCK - position % BLOCK
            continue
        length, part = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        piece += data[position + 7 : position + 7 + length]
        position += 7 + length
        if part in (1, 4):  # A whole record, or the last part of one.
            record, piece = wandb_internal_pb2.Record.FromString(piece), b""
            if record.WhichOneof("record_type") == kind:
                records.append(getattr(record, kind))
    return records


@pytest.fixture
def offline(monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def test_weights_and_biases_stores_metrics_config_and_alerts_offline(tmp_path, offline):
    track(tmp_path / "my_run" / "sparse", "wandb", 1, 3, ("spike", "loss 9"))
    (run,) = {record.run_id: record for record in wandb_records(tmp_path, "run")}.values()
    assert (run.display_name, run.project) == ("my_run/sparse", trackers.PROJECT)
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert {name: config[name] for name in CONFIG} == CONFIG
    rows = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item}
        for row in wandb_records(tmp_path, "history")
    ]
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    assert [row["train/loss"] for row in rows[:3]] == [3.0] * 3
    assert rows[3]["eval/bits_per_byte"] == 1.5
    assert rows[3]["eval/bits_per_byte/my corpus#1"] == 1.25
    (alert,) = wandb_records(tmp_path, "alert")
    assert (alert.title, alert.text) == ("spike at step 3", "loss 9")
    assert "step" in {metric.step_metric for metric in wandb_records(tmp_path, "metric")}


def test_a_run_folder_with_weights_and_biases_has_no_links_that_lead_out(tmp_path, offline):
    tracker = trackers.opened("wandb", trackers.TrackedRun(tmp_path, "name", 0, CONFIG))
    refuse_outside_links(tmp_path)
    tracker.write(train_row(1))
    tracker.close()
    refuse_outside_links(tmp_path)
    assert list(tmp_path.rglob("*.wandb"))


def test_a_resumed_run_is_the_same_run_of_weights_and_biases(tmp_path, offline):
    for first, last in ((1, 2), (2, 3)):
        track(tmp_path / "run" / "sparse", "wandb", first, last)
    names = {path.name for path in tmp_path.rglob("*.wandb")}
    assert len(names) == 1 < len(list(tmp_path.rglob("*.wandb")))


def test_mlflow_stores_metrics_params_and_alerts_and_a_resumed_run_continues(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    folder = tmp_path / "my_run" / "sparse"
    track(folder, "mlflow", 1, 2, ("spike", "loss 9"))
    track(folder, "mlflow", 2, 3, ("restart", "resumed"))
    track(tmp_path / "my_run" / "dense", "mlflow", 1, 1)
    client = mlflow.MlflowClient()
    number = client.get_experiment_by_name(trackers.PROJECT).experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([number])}
    assert set(runs) == {"my_run/sparse", "my_run/dense"}
    run = runs["my_run/sparse"]
    assert run.info.status == "FINISHED"
    assert run.data.params["training.batch"] == "8"
    assert run.data.params["training.optimizer"] == "adamw"
    assert run.data.tags["alert.spike"] == "step 2: loss 9"
    assert run.data.tags["alert.restart"] == "step 3: resumed"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(metric.step for metric in history) == [1, 2, 2, 3]
    assert {metric.value for metric in history} == {3.0}
    assert run.data.metrics["eval/bits_per_byte/my corpus_1"] == 1.25

    tracked = trackers.TrackedRun(folder, "my_run/sparse", 3, CONFIG)
    tracker = trackers.opened("mlflow", tracked)
    assert client.get_run(run.info.run_id).info.status == "RUNNING"
    tracker.close()
    assert client.get_run(run.info.run_id).info.status == "FINISHED"
