"""Side networks beside LoRA, at toy size."""

import json

import pytest
from exit_status import exit_status

from experiments import side_memory


def test_a_width_that_is_no_multiple_of_a_head_is_refused(capsys):
    assert exit_status(side_memory, "--width=100") == 2
    assert "legal: multiples of 64" in capsys.readouterr().err


@pytest.mark.slow
def test_bytes_and_seconds_are_measured_on_each_backbone(tmp_path, capsys):
    flags = "--layers=2", "--width=64", "--batch=2", "--sequence=32", "--rounds=1"
    assert exit_status(side_memory, *flags, f"--keep={tmp_path}") == 0
    [path] = tmp_path.iterdir()
    rows = json.loads(path.read_text())["rows"]
    assert [row["backbone"] for row in rows] == ["dense", "int8", "sparse", "dense", "dense"]
    assert all(row["side"]["flops_per_token"] < row["lora"]["flops_per_token"] for row in rows)
    assert "LoRA" in capsys.readouterr().out
