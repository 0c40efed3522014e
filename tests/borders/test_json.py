"""JSON files of a run that somebody changed: read, or refused as damaged."""

import json

import drawn
import pytest
from drawn_inputs import DrawnInputs

from sparse_dataflow.evaluation import run_files
from sparse_dataflow.evaluation.run_files import RunRecord
from sparse_dataflow.monitoring import goodput
from sparse_dataflow.monitoring.metrics import read_metrics
from sparse_dataflow.runs.run_config import preset


@pytest.fixture(scope="module")
def saved():
    config = preset("pico")
    steps = dict.fromkeys(config.variants, 3)
    record = RunRecord("x", ("python",), "now", {"jax": "1"}, "cpu", "texts", "0", "0", 512, steps)
    row = {"kind": "train", "step": 1, "tokens": 9, "seconds": 0.1, "loss": 1.0}
    return config.to_json(), record.to_json(), row


def changed(draw, fields):
    """A JSON object like `fields`, changed at any depth."""
    names = [name for name, value in fields.items() if isinstance(value, dict) and value]
    if names and draw.random() < 0.6:
        name = draw.choice(names)
        inner = json.loads(json.dumps(fields[name]))
        key = draw.choice(sorted(inner))
        inner[key] = drawn.value(draw)
        fields = fields | {name: inner}
        if draw.random() < 0.7:
            return json.dumps(fields).encode()
    return drawn.json_bytes(draw, fields) if draw.random() < 0.8 else json.dumps(fields).encode()


def test_changed_files_of_a_run_are_read_or_refused(saved, tmp_path):
    config, record, row = saved
    counts = DrawnInputs("JSON files of a run")
    for _ in counts:
        draw = counts.draw
        (tmp_path / run_files.CONFIG).write_bytes(changed(draw, config))
        (tmp_path / run_files.RECORD).write_bytes(changed(draw, record))
        for name in (goodput.NAME, "metrics.jsonl"):
            lines = [changed(draw, row) for _ in range(draw.randint(0, 3))]
            (tmp_path / name).write_bytes(b"\n".join(lines))
        with counts.one((tmp_path / run_files.CONFIG).read_bytes()):
            read_metrics(tmp_path / "metrics.jsonl")
            goodput.read(tmp_path / goodput.NAME)
            run_files.read_record(tmp_path, run_files.read_config(tmp_path))
