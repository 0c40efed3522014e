"""The relay's experiments run at a toy's size and keep what they print."""

import dataclasses
import json

import pytest

from experiments.benchmarks import relay
from sparse_dataflow.core.config.training import TrainingConfig
from sparse_dataflow.hardware.chips import Chip
from sparse_dataflow.planner import plan_memory, relay_step
from sparse_dataflow.relay.relay import RelayConfig
from sparse_dataflow.runs.run_config import SIZES

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


def test_the_largest_batch_is_the_largest_whose_plan_fits():
    """Every batch and every legal number of micro-batches is planned, for each executor."""
    model, most, rows = dataclasses.replace(SIZES["pico"], remat="full"), 23, 3
    training = TrainingConfig(batch=1, sequence=64, micro_batches=1)

    def planned(batch, micro_batches, stash):
        how = dataclasses.replace(training, batch=batch, micro_batches=micro_batches)
        if stash is None:
            return plan_memory.training_bytes(model, how).total
        return relay_step.estimate(model, how, stash=stash, pinned=False).device_total

    for stash in ("device", "host", None):
        shapes = [(batch, 1) for batch in range(1, most + 1 if stash is None else rows)]
        if stash:  # Micro-batches have at least `rows` sequences, and less than two more.
            shapes += [
                (count * each, count)
                for count in range(1, most + 1)
                for each in range(rows, rows + 3)
                if count * each <= most and (count * each) // rows == count
            ]
        sizes = {shape: planned(*shape, stash) for shape in shapes}
        least = sizes[1, 1]
        for limit in (least, *(int(f * max(sizes.values())) for f in (0.6, 0.8, 1))):
            config = RelayConfig(stash) if stash else None
            how, need = relay.largest_batch(
                model, training, config, Chip("cpu"), limit, most, device_batch=rows
            )
            best = max(shape for shape, size in sizes.items() if size <= limit)
            assert (how.batch, how.micro_batches, need) == (*best, sizes[best])
        unfit = relay.largest_batch(model, training, config, Chip("cpu"), least - 1, most, rows)
        assert unfit == (None, least)


@pytest.mark.slow
def test_each_executor_has_its_largest_batch_of_a_device(job, tmp_path):
    """`whole` does not fit the smaller device, and its row says what it would need."""
    arguments = ("--scale=pico", "--steps=1", "--batches=8", "--device_batch=2")
    by_limit = {}
    for limit in ("2MiB", "9MiB"):
        folder = tmp_path / limit
        flags = (*arguments, f"--device_memory={limit}", f"--keep={folder}")
        done = job.run(*flags, experiment="relay_bert_large")
        assert done.returncode == 0, done.stderr
        by_limit[limit] = result(folder)
    small, large = (each["rows"] for each in by_limit.values())
    assert [row["executor"] for row in small] == ["relay", "relay", "whole"]
    assert small[-1]["step_seconds"] == "does not fit"
    assert small[-1]["planned_device_bytes"] > by_limit["2MiB"]["device_memory"] == 2 * 2**20
    for row in large:
        assert row["planned_device_bytes"] <= 9 * 2**20
        assert row["device_bytes"] <= 1.1 * row["planned_device_bytes"]
    *relays, whole = large
    assert all(row["batch"] >= whole["batch"] and whole["micro_batches"] == 1 for row in relays)
    for row in relays:
        seconds = [each["step_seconds"] / each["batch"] for each in (row, whole)]
        assert row["over_whole"] == pytest.approx(seconds[0] / seconds[1])


def test_a_device_of_no_bytes_is_refused(refused):
    assert "16GiB, 512MiB" in refused("--device_memory=16GB", experiment="relay_bert_large")


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
