"""The relay's experiments run at a toy's size and keep what they print."""

import json

import pytest

PICO = ("--scale=pico", "--density=0.25", "--block=16", "--batch=4", "--steps=1")


def result(folder):
    (found,) = folder.glob("*.json")
    return json.loads(found.read_text())


@pytest.mark.slow
def test_depth_costs_no_memory(job, tmp_path):
    done = job.run(*PICO, "--depths=2,6", f"--keep={tmp_path}", experiment="relay_depth")
    assert done.returncode == 0, done.stderr
    few, many = result(tmp_path)["rows"]
    assert (few["layers"], many["layers"]) == (2, 6)
    assert max(few["device_bytes"], many["device_bytes"]) <= few["planned_device_bytes"]
    assert many["planned_device_bytes"] == few["planned_device_bytes"]


@pytest.mark.slow
def test_bert_large_compares_both_executors(job, tmp_path):
    arguments = ("--scale=pico", "--steps=1", "--batches=4", "--device_batch=2")
    done = job.run(*arguments, f"--keep={tmp_path}", experiment="relay_bert_large")
    assert done.returncode == 0, done.stderr
    device, whole, host, again = result(tmp_path)["rows"]
    assert [row["executor"] for row in (device, whole, host)] == ["relay", "whole", "relay"]
    assert again["losses"] == whole["losses"]
    assert device["over_whole"] == pytest.approx(device["step_seconds"] / whole["step_seconds"])
    assert device["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert host["losses"] == device["losses"]


@pytest.mark.parametrize(
    "host_gb, placement",
    [
        (64, None),
        (128, "files"),
        (512, "copies of weights made at each fetch"),
        (550, "bfloat16 moments"),
        (800, "float32 moments"),
    ],
)
def test_fifty_billion_are_planned(job, tmp_path, host_gb, placement):
    """L2L trained 50 B dense parameters with 16 GB on the device and 512 GB on the host."""
    done = job.run(f"--host_gb={host_gb}", f"--keep={tmp_path}", experiment="relay_50b")
    assert done.returncode == 0, done.stderr
    found = result(tmp_path)
    dense = found["dense"]
    assert dense["updated"] > 50e9 and dense["fits_host"] == bool(placement)
    assert dense["placement"].endswith(placement or "files")
    assert dense["host"]["masters and moments"] > 400e9 or "files" in dense["placement"]
    assert found["sparse"]["fits_device"] and found["sparse"]["fits_host"]
    assert f"updates {dense['update_seconds']:,.3g} s on the host" in done.stdout


def test_depths_that_are_none_are_refused(refused):
    assert "--depths=2,x" in refused("--depths=2,x", experiment="relay_depth")
