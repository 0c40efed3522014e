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
    device, host, whole = result(tmp_path)["rows"]
    assert [row["executor"] for row in (device, host, whole)] == ["relay", "relay", "whole"]
    assert device["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert host["losses"] == device["losses"]


def test_fifty_billion_are_planned(job, tmp_path):
    done = job.run(f"--keep={tmp_path}", experiment="relay_50b")
    assert done.returncode == 0, done.stderr
    found = result(tmp_path)
    assert found["dense"]["updated"] > 50e9 and not found["dense"]["fits_host"]
    assert found["sparse"]["fits_device"] and found["sparse"]["fits_host"]


def test_depths_that_are_none_are_refused(refused):
    assert "--depths=2,x" in refused("--depths=2,x", experiment="relay_depth")
