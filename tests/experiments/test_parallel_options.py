"""Every option of every executor trains the default pattern, as a user starts it."""

import dataclasses
import json

import numpy as np
import pytest
from main_job import rows
from ports import free_port

from sparse_dataflow.core.config import settings
from sparse_dataflow.core.config.sparsity import SparsityConfig
from sparse_dataflow.core.layouts.patterns import make_layout
from sparse_dataflow.runs.parallel import ONLY_RELAY, ParallelConfig

FOLDER, PORT = "FOLDER", "PORT"  # Replaced by a new folder and a free port.
OF_MODEL = ("model.experts", "model.num_layers")
STAGES = {"mesh": "stage:2", "model.num_layers": "4", "training.micro_batches": "4"}
RELAY = {"executor": "relay"}
RUNS = [
    {
        "executor": "auto",
        "memory_limit": "1GiB",
        "processes": "1",
        "process": "0",
        "coordinator": f"127.0.0.1:{PORT}",
        "join_timeout": "60",
        "heartbeat": "20",
    },
    *({"mesh": f"{axis}:2"} for axis in ("data", "tensor", "feature")),
    {"mesh": "fsdp:2", "executor": "whole", "zero": "0"},
    {"mesh": "fsdp:2", "zero": "1", "sub_batches": "2"},
    {"mesh": "fsdp:2", "zero": "2", "model.experts": "2", "experts": "gather"},
    {"mesh": "fsdp:2", "zero": "3", "model.experts": "2", "experts": "exchange"},
    {**STAGES, "executor": "pipeline", "schedule": "gpipe"},
    *({**STAGES, "schedule": name} for name in ("1f1b", "interleaved:2", "zero_bubble")),
    {**RELAY, "stash": "device", "clipping": "exact", "depth_schedule": "constant"},
    {**RELAY, "stash": "host", "server_dir": FOLDER},
    {**RELAY, "clipping": "eager"},
    *({**RELAY, "depth_schedule": each} for each in ("drop:0.25", "grow:0.5")),
]
"""Options of `ParallelConfig`, and of other parts, that a run has together."""

OTHER_RESULTS = {"eager", "drop:0.25", "grow:0.5"}
"""Values with which later steps differ from those of one program."""


def run(job, folder, *flags, devices=1):
    """Returns the losses of three steps of the default pattern."""
    count = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    plan = job.plan(folder, "--twin=no", "--steps=3", "--set=run.eval_every=3", *flags)
    assert not any(flag.startswith(("--pattern", "--set=sparsity.pattern")) for flag in plan)
    done = job.start(*plan, environment=count)
    assert done.wait() == 0, done.stderr
    return [row["loss"] for row in rows(folder, "sparse") if row["kind"] in ("train", "final")]


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    """Function (flags of the model) -> losses of one program on one device."""
    losses = {}

    def whole(*flags):
        if flags not in losses:
            losses[flags] = run(job, tmp_path_factory.mktemp("whole") / "run", *flags)
        return losses[flags]

    return whole


def test_the_runs_have_every_option_and_every_choice():
    runs = [{name: value for name, value in each.items() if "." not in name} for each in RUNS]
    assert set().union(*runs) == {field.name for field in dataclasses.fields(ParallelConfig)}
    for setting in settings.settings(ParallelConfig):
        assert {*(setting.choices or ())} <= {each.get(setting.name) for each in runs}
    assert all(each["executor"] == "relay" for each in runs if {*ONLY_RELAY} & each.keys())


def test_the_default_pattern_has_groups():
    """Else the cases would not tell a layout with groups from one without."""
    layout = make_layout(SparsityConfig().pattern, 256, 512, block=16, density=0.25)
    assert layout.groups is not None


@pytest.mark.slow
@pytest.mark.parametrize("options", RUNS, ids=lambda each: " ".join(map("=".join, each.items())))
def test_options_train_the_default_pattern(job, whole, tmp_path, options):
    def flag(name):
        value = options[name].replace(FOLDER, str(tmp_path / "server")).replace(PORT, port)
        return f"--set={name if '.' in name else f'parallel.{name}'}={value}"

    port, devices = str(free_port()), 2 if "mesh" in options else 1
    losses = run(job, tmp_path / "run", *map(flag, options), devices=devices)
    expected = whole(*(flag(name) for name in OF_MODEL if name in options))
    assert len(losses) == len(expected) == 4
    if OTHER_RESULTS & {*options.values()}:
        assert losses[0] == pytest.approx(expected[0], rel=0.05)
        assert losses[-1] < losses[0]
    else:
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
    check_report(tmp_path / "run", constant="depth_schedule" not in options)


def check_report(folder, constant):
    """Its MFU is between those that the log has of each step."""
    [variant] = json.loads((folder / "report.json").read_text())["variants"]
    logged = [row["mfu"] for row in rows(folder, "sparse") if row["kind"] == "train"]
    assert 0 < min(logged) and sum(variant["memory"].values()) == variant["training_bytes"]
    if constant:  # Else the FLOPs of a step change with its depth.
        assert 0.999 * min(logged) <= variant["mfu"] <= 1.001 * max(logged)
